"""The store on Redis (7.0 or Valkey). Every key is built here, or from a prefix of here by commit.lua; every write is
one fenced script."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import chain
from typing import Any

import msgpack
import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from scheduler_service.core.lifecycle import State
from scheduler_service.store import fields
from scheduler_service.store.port import Fenced, Index, LostWrites, Pulse, Stored, StoreUnavailable, Verdict, Write

LEVELS = 16  # as many queues as a policy may have

_LEAD = """
local stored = redis.call('HMGET', KEYS[1], 'epoch', 'commit')
if ARGV[2] and (ARGV[2] ~= (stored[1] or '0') or ARGV[3] ~= (stored[2] or '')) then
  return redis.error_reply('FENCED another leader has taken over')
end
local epoch = string.format('%.0f', math.max(tonumber(stored[1] or '0') + 1, tonumber(ARGV[1])))
redis.call('HSET', KEYS[1], 'epoch', epoch, 'commit', 0)
return epoch
"""

_STEP_DOWN = """
if redis.call('HGET', KEYS[1], 'epoch') == ARGV[1] then redis.call('HDEL', KEYS[1], 'commit') end
"""

_SAVE_LEARNED = """
local epoch, mine = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0'), tonumber(ARGV[1])
if epoch > mine then return redis.error_reply('FENCED another leader has taken over') end
if epoch < mine then return redis.error_reply('LOST earlier commits') end
redis.call('SET', KEYS[2], ARGV[2])
"""


class Keys:
    """With one hash tag, so that a script's keys share a slot."""

    def __init__(self, namespace: str) -> None:
        self._prefix = f"{{{namespace}}}"
        self.leader = f"{self._prefix}:leader"
        self.with_kv = f"{self._prefix}:with-kv"
        self.learned = f"{self._prefix}:learned"
        self.queues = [f"{self._prefix}:queue:{level}" for level in range(1, LEVELS + 1)]

    def request(self, id: str) -> str:
        return f"{self._prefix}:request:{id}"

    def log(self, id: str) -> str:
        return f"{self._prefix}:log:{id}"


class RedisStore:
    def __init__(
        self,
        url: str,
        *,
        namespace: str = "laps-sd",
        keep_s: int = 600,
        timeout_s: float = 2.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`keep_s`: how long an ended request can still be asked for. `options`: of the connection, beside the URL's.

        Raises ValueError if the URL is malformed.
        """
        # No retries in here: a commit that may have happened is repeated by its owner, who knows that it is idempotent.
        self._redis: aioredis.Redis = aioredis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            **(options or {}),
        )
        self.keys = Keys(namespace)
        self._keep_s = keep_s
        self._lead = self._redis.register_script(_LEAD)
        self._step_down = self._redis.register_script(_STEP_DOWN)
        self._save_learned = self._redis.register_script(_SAVE_LEARNED)
        self._commit = self._redis.register_script(files(__package__).joinpath("commit.lua").read_text())

    async def lead(self, now_ms: int, seen: Pulse | None = None) -> int:
        unchanged = [] if seen is None else [seen.epoch, "" if seen.commit is None else seen.commit]
        return int(await _guarded(self._lead(keys=[self.keys.leader], args=[now_ms, *unchanged])))

    async def pulse(self) -> Pulse:
        epoch, commit = await _guarded(self._redis.hmget(self.keys.leader, "epoch", "commit"))
        return Pulse(int(epoch or 0), None if commit is None else int(commit))

    async def step_down(self, epoch: int) -> None:
        await _guarded(self._step_down(keys=[self.keys.leader], args=[epoch]))

    async def commit(self, epoch: int, number: int, writes: Sequence[Write]) -> list[Verdict]:
        return await self._write(epoch, number, "", writes)

    async def rewrite(self, epoch: int, number: int, follows: int, writes: Sequence[Write]) -> None:
        await self._write(epoch, number, follows, writes)

    async def _write(self, epoch: int, number: int, follows: int | str, writes: Sequence[Write]) -> list[Verdict]:
        changes = []
        for write in writes:
            record, ended = write.record, write.ending is not None
            id = record.request.id
            pairs: fields.Fields = {} if write.brief else fields.of_record(record)
            if write.submit is not None:
                pairs |= fields.of_request(record.request) | {"submit": write.submit}
            if write.ending is not None:
                pairs["ending"] = write.ending
            with_kv = record.state is not State.WAITING and not ended
            start = record.emitted if write.start is None else write.start
            change = (id, fields.of_arrival(record.request), write.submit is not None, start, record.emitted, write.log)
            changes.append((*change, record.level, repr(record.key), with_kv, ended, [*chain(*pairs.items())]))
        keys = [self.keys.leader, self.keys.with_kv, *self.keys.queues]
        changed = msgpack.packb(changes, use_bin_type=False)
        args = [epoch, number, follows, self._keep_s, LEVELS, self.keys.request(""), self.keys.log(""), changed]
        return [Verdict(verdict) for verdict in await _guarded(self._commit(keys=keys, args=args))]

    async def index(self) -> Index:
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.smembers(self.keys.with_kv)
        for queue in self.keys.queues:
            pipeline.zrange(queue, 0, -1)
        members, *queues = await _guarded(pipeline.execute())
        live = [raw for queue in queues for raw in queue]
        return Index(
            [raw.decode() for raw in live if raw in members], [raw.decode() for raw in live if raw not in members]
        )

    async def get(self, id: str) -> Stored | None:
        return (await self.read([id]))[0]

    async def save_learned(self, epoch: int, learned: bytes) -> None:
        await _guarded(self._save_learned(keys=[self.keys.leader, self.keys.learned], args=[epoch, learned]))

    async def learned(self) -> bytes | None:
        kept: bytes | None = await _guarded(self._redis.get(self.keys.learned))
        return kept

    async def close(self) -> None:
        await self._redis.aclose()

    async def read(self, ids: Sequence[str]) -> list[Stored | None]:
        pipeline = self._redis.pipeline(transaction=True)
        for id in ids:
            pipeline.hgetall(self.keys.request(id))
            pipeline.get(self.keys.log(id))
        answers = await _guarded(pipeline.execute())
        return [_stored(id, answers[2 * i], answers[2 * i + 1]) for i, id in enumerate(ids)]


def _stored(id: str, raw: dict[bytes, bytes], log: bytes | None) -> Stored | None:
    if not raw:
        return None
    submit, ending = raw.pop(b"submit"), raw.pop(b"ending", None)
    record = fields.to_record(id, {name.decode(): value for name, value in raw.items()}, log or b"")
    return Stored(record, submit, log or b"", ending)


async def _guarded(call: Any) -> Any:
    try:
        return await call
    except ResponseError as error:
        if str(error).startswith("FENCED"):
            raise Fenced(str(error)) from error
        if str(error).startswith("LOST"):
            raise LostWrites(str(error)) from error
        raise StoreUnavailable(str(error)) from error
    except (RedisError, OSError, TimeoutError) as error:
        raise StoreUnavailable(str(error) or type(error).__name__) from error
