"""The store on Redis (7.0 or Valkey). Every key is built here, and every write is one fenced script."""

from collections.abc import AsyncIterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from scheduler_service.store import fields
from scheduler_service.store.port import Fenced, Stored, StoreUnavailable, Verdict, Write

LEVELS = 16  # more queues than any policy has

_LEAD = """
local epoch = math.max(tonumber(redis.call('GET', KEYS[1]) or '0') + 1, tonumber(ARGV[1]))
epoch = string.format('%.0f', epoch)
redis.call('SET', KEYS[1], epoch)
return epoch
"""

_SAVE_LEARNED = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return redis.error_reply('FENCED another leader has taken over')
end
redis.call('SET', KEYS[2], ARGV[2])
"""


class Keys:
    """With one hash tag, so that a script's keys share a slot."""

    def __init__(self, namespace: str) -> None:
        self._prefix = f"{{{namespace}}}"
        self.epoch = f"{self._prefix}:epoch"
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
        self._save_learned = self._redis.register_script(_SAVE_LEARNED)
        self._commit = self._redis.register_script(files(__package__).joinpath("commit.lua").read_text())

    async def lead(self, now_ms: int) -> int:
        return int(await _guarded(self._lead(keys=[self.keys.epoch], args=[now_ms])))

    async def commit(self, epoch: int, writes: Sequence[Write]) -> list[Verdict]:
        keys = [self.keys.epoch, *self.keys.queues]
        args: list[str | bytes | int | float] = [epoch, self._keep_s, LEVELS]
        for write in writes:
            record = write.record
            id = record.request.id
            keys += (self.keys.request(id), self.keys.log(id))
            pairs: dict[str, str | bytes] = {**fields.of_record(record)}
            if write.submit is not None:
                pairs |= {**fields.of_request(record.request), "submit": write.submit}
            if write.ending is not None:
                pairs["ending"] = write.ending
            start = -1 if write.start is None else write.start
            new = 0 if write.start is None else record.emitted - write.start
            args += (id, int(write.submit is not None), start, new, write.log, record.level, record.key)
            args += (int(write.ending is not None), len(pairs))
            for pair in pairs.items():
                args += pair
        return [Verdict(verdict) for verdict in await _guarded(self._commit(keys=keys, args=args))]

    async def live(self) -> AsyncIterator[Stored]:
        for queue in self.keys.queues:
            ids = [raw.decode() for raw in await _guarded(self._redis.zrange(queue, 0, -1))]
            for first in range(0, len(ids), 256):
                for stored in await self._read(ids[first : first + 256]):
                    if stored is not None:
                        yield stored

    async def get(self, id: str) -> Stored | None:
        return (await self._read([id]))[0]

    async def save_learned(self, epoch: int, learned: bytes) -> None:
        await _guarded(self._save_learned(keys=[self.keys.epoch, self.keys.learned], args=[epoch, learned]))

    async def learned(self) -> bytes | None:
        kept: bytes | None = await _guarded(self._redis.get(self.keys.learned))
        return kept

    async def close(self) -> None:
        await self._redis.aclose()

    async def _read(self, ids: Sequence[str]) -> list[Stored | None]:
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
    record = fields.to_record(id, {name.decode(): value.decode() for name, value in raw.items()})
    return Stored(record, submit, log or b"", ending)


async def _guarded(call: Any) -> Any:
    try:
        return await call
    except ResponseError as error:
        if str(error).startswith("FENCED"):
            raise Fenced(str(error)) from error
        raise StoreUnavailable(str(error)) from error
    except (RedisError, OSError, TimeoutError) as error:
        raise StoreUnavailable(str(error) or type(error).__name__) from error
