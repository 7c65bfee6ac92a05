"""The store on Redis (7.0 or later, or Valkey). Every key is built here, or by commit.lua from a prefix of here. Every
write is a script that checks who leads (scripts.py); what a request's fields mean is in fields.py."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import msgpack
from redis.commands.core import AsyncScript
from redis.exceptions import AuthenticationError, NoScriptError, OutOfMemoryError, RedisError, ResponseError

from scheduler_service.core.lifecycle import State
from scheduler_service.store import connection, fields, scripts
from scheduler_service.store.port import (
    Fenced,
    Index,
    LostWrites,
    Pulse,
    StoreBusy,
    Stored,
    StoreFull,
    StoreRefuses,
    StoreUnavailable,
    TooFewReplicas,
    Unreadable,
    Verdict,
    Write,
    WrongType,
)

UNREADABLE_KEPT_S = 7 * 86_400  # how long an unreadable request is kept, for a person to look at
# Error answers that may pass by themselves; all others need a person.
DEMOTED = ("READONLY", "MASTERDOWN")  # another server would not give these
FAILING_OVER = (*DEMOTED, "CLUSTERDOWN")
BUSY = ("BUSY", "MISCONF", "TRYAGAIN")  # it runs a long script, cannot write its disk, or moves keys
# For replicas, each time that they are asked. A leader that asks again every so often shows its standby that it lives:
# with the pause in between it is less than the least `lease_s` that anybody should use.
REPLICAS_MS = 250
MAX_READS = 64  # at once; more wait. The client library has 100 connections, and a commit must always find one
ENCODED_AT_ONCE = 64  # writes of a commit, until other tasks run
ASK_SENTINELS_S = 0.5  # between two looks at whether another server is the primary now
_VERDICTS = {verdict.value: verdict for verdict in Verdict}  # to call `Verdict` costs ten times as much


class Keys:
    """All with one hash tag, so that the keys of a script share a slot of a cluster."""

    def __init__(self, namespace: str) -> None:
        self._prefix = f"{{{namespace}}}"
        self.leader = f"{self._prefix}:leader"
        self.with_kv = f"{self._prefix}:with-kv"
        self.learned = f"{self._prefix}:learned"
        self.queues = [f"{self._prefix}:queue:{level}" for level in range(1, fields.LEVELS + 1)]
        self.all_unreadable = f"{self._prefix}:unreadable"

    def request(self, id: str) -> str:
        return f"{self._prefix}:request:{id}"

    def log(self, id: str) -> str:
        return f"{self._prefix}:log:{id}"

    def unreadable(self, id: str) -> str:
        return f"{self._prefix}:unreadable:{id}"

    def unreadable_log(self, id: str) -> str:
        return f"{self._prefix}:unreadable-log:{id}"


class RedisStore:
    def __init__(
        self,
        url: str,
        *,
        namespace: str = "laps-sd",
        keep_s: int = 600,
        timeout_s: float = 2.0,
        replicas: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`keep_s`: how long an ended request can still be asked for. `replicas`: so many have a commit, and all before
        it, when it is acknowledged. `options`: of the connection, beside the URL's; connection.py has both.

        Raises ValueError or TypeError if the URL is malformed.
        """
        self._redis = connection.connect(url, timeout_s, options or {})
        self.keys = Keys(namespace)
        self._keep_s, self._replicas, self._timeout_s = keep_s, replicas, timeout_s
        self._reads = asyncio.Semaphore(MAX_READS)
        self._tried = (0, 0)  # epoch and number of the last commit that was begun
        self._by_sentinels = connection.by_sentinels(url)
        self._look: asyncio.Task[None] | None = None  # whether another server is the primary now
        script = self._redis.register_script
        self._touch = script(scripts.TOUCH)
        self._lead, self._step_down = script(scripts.LEAD), script(scripts.STEP_DOWN)
        self._commit, self._commit_nothing = script(scripts.COMMIT), script(scripts.COMMIT_NOTHING)
        self._index, self._read = script(scripts.INDEX), script(scripts.READ)
        self._set_aside, self._save_learned = script(scripts.SET_ASIDE), script(scripts.SAVE_LEARNED)

    async def lead(self, now_ms: int, seen: Pulse | None = None, attempt: str | None = None) -> int:
        if self._by_sentinels and await connection.has_moved(self._redis):
            # Nobody commits there any more. A leader that began on it would rewrite, on the new primary, what it read.
            await connection.reconnect(self._redis)
            raise StoreUnavailable("another server is the primary now")
        unchanged = [] if seen is None else [seen.epoch, "" if seen.commit is None else seen.commit]
        args = [now_ms, attempt or uuid4().hex, *unchanged]
        return int(await self._guarded(self._lead(keys=[self.keys.leader], args=args)))

    async def pulse(self) -> Pulse:
        leader = self.keys.leader
        epoch, commit, touched = await self._guarded(self._redis.hmget(leader, "epoch", "commit", "touched"), leader)
        try:
            return Pulse(int(epoch or 0), None if commit is None else int(commit), int(touched or 0))
        except ValueError:
            raise WrongType(f"delete {leader}, and start again: it has fields that are no numbers") from None

    async def step_down(self, epoch: int) -> None:
        await self._guarded(self._step_down(keys=[self.keys.leader], args=[epoch]))

    async def commit(self, epoch: int, number: int, writes: Sequence[Write]) -> list[Verdict]:
        return await self._write(epoch, number, "", writes)

    async def rewrite(
        self, epoch: int, number: int, follows: int, writes: Sequence[Write], before: Pulse | None = None
    ) -> None:
        await self._write(epoch, number, follows, writes, before)

    async def _write(
        self, epoch: int, number: int, follows: int | str, writes: Sequence[Write], before: Pulse | None = None
    ) -> list[Verdict]:
        changes = []
        for write in writes:
            changes.append(_change(write))
            if len(changes) % ENCODED_AT_ONCE == 0:
                await asyncio.sleep(0)
        changed = msgpack.packb(changes, use_bin_type=False)
        keys = [self.keys.leader, self.keys.with_kv, *self.keys.queues]
        args = [epoch, number, follows, self._keep_s, fields.LEVELS, self.keys.request(""), self.keys.log(""), changed]
        if before is not None:
            args += [before.epoch, "" if before.commit is None else before.commit]
        if self._by_sentinels and (self._look is None or self._look.done()):
            self._look = asyncio.create_task(self._look_for_primary())
        script = self._commit if writes else self._commit_nothing
        again, self._tried = self._tried == (epoch, number), (epoch, number)
        call = self._on_replicas(script, keys, args, again) if self._replicas else script(keys=keys, args=args)
        return [_VERDICTS[verdict] for verdict in await self._guarded(call)]

    async def _on_replicas(
        self, script: AsyncScript, keys: Sequence[str], args: Sequence[Any], again: bool, load: bool = False
    ) -> Any:
        """The answer of a script, once enough replicas have what it wrote. WAIT waits for what its own connection has
        written last. A commit that is tried `again` may write nothing, so something is written after it. `load`: Redis
        does not know the scripts; it is told on the same connection, since another one may lead to another server."""
        async with self._redis.pipeline(transaction=False) as pipe:
            for unknown in (script, self._touch) if load else ():
                pipe.script_load(unknown.script)
            pipe.evalsha(script.sha, len(keys), *keys, *args)
            if again:
                pipe.evalsha(self._touch.sha, 1, keys[0], args[0])
            pipe.execute_command("WAIT", self._replicas, REPLICAS_MS)
            answers = (await pipe.execute(raise_on_error=False))[2 if load else 0 :]
        for answer in answers:
            if isinstance(answer, NoScriptError) and not load:
                return await self._on_replicas(script, keys, args, again, load=True)
            if isinstance(answer, Exception):
                raise answer
        if answers[-1] < self._replicas:
            raise TooFewReplicas(f"{answers[-1]} of {self._replicas} replicas have the last commit")
        return answers[0]

    async def index(self) -> Index:
        members, *queues = await self._guarded(self._index(keys=[self.keys.with_kv, *self.keys.queues]))
        live = [raw for queue in queues for raw in queue if raw.isascii()]  # nothing else is a request's id
        with_kv = set(members)
        return Index(
            [raw.decode() for raw in live if raw in with_kv], [raw.decode() for raw in live if raw not in with_kv]
        )

    async def get(self, id: str) -> Stored | Unreadable | None:
        return (await self.read([id]))[0]

    async def read(self, ids: Sequence[str]) -> list[Stored | Unreadable | None]:
        keys = [key for id in ids for key in (self.keys.request(id), self.keys.log(id))]
        async with self._reads:
            answers = await self._guarded(self._read(keys=keys)) if keys else []
        return [_stored(id, answers[2 * i], answers[2 * i + 1]) for i, id in enumerate(ids)]

    async def set_aside(self, epoch: int, id: str, reason: str) -> None:
        keys = self.keys
        kept = [keys.unreadable(id), keys.unreadable_log(id), keys.all_unreadable]
        named = [keys.leader, keys.request(id), keys.log(id), *kept, keys.with_kv, *keys.queues]
        await self._guarded(self._set_aside(keys=named, args=[epoch, id, reason, self._keep_s, UNREADABLE_KEPT_S]))

    async def save_learned(self, epoch: int, learned: bytes) -> None:
        await self._guarded(self._save_learned(keys=[self.keys.leader, self.keys.learned], args=[epoch, learned]))

    async def learned(self) -> bytes | None:
        kept: bytes | None = await self._guarded(self._redis.get(self.keys.learned), self.keys.learned)
        return kept

    async def _look_for_primary(self) -> None:
        await asyncio.sleep(ASK_SENTINELS_S)
        if await connection.has_moved(self._redis):
            await connection.reconnect(self._redis)

    async def close(self) -> None:
        if self._look is not None:
            self._look.cancel()
        await connection.close(self._redis)

    async def _guarded(self, call: Awaitable[Any], key: str = "") -> Any:
        """The answer to a call; its errors in the port's words. `key`: the one that it is about; scripts say it."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await _told(call, key)
        except TimeoutError:
            raise StoreUnavailable(f"Redis did not answer within {self._timeout_s:g} s") from None
        except StoreUnavailable as error:
            if isinstance(error, TooFewReplicas) or str(error).startswith(DEMOTED):
                await connection.reconnect(self._redis)  # perhaps another server is the primary now
            raise


def _change(write: Write) -> tuple[Any, ...]:
    """One write, in the order in which commit.lua unpacks it."""
    record, ended, submitted = write.record, write.ending is not None, write.submit is not None
    if write.brief:  # most writes are
        request = record.request
        return (
            request.id,
            request.arrival,
            False,
            write.start,
            write.emitted,
            write.log,
            record.level,
            "",
            True,
            False,
            (),
        )
    pairs = fields.of_record(record)
    if write.submit is not None:
        pairs += [*fields.of_request(record.request), "submit", write.submit, "model", write.model]
    if write.ending is not None:
        pairs += ["ending", write.ending]
    start = record.emitted if write.start is None else write.start
    with_kv = record.state is not State.WAITING and not ended
    what = (record.request.id, record.request.arrival, submitted, start, record.emitted, write.log)
    return (*what, record.level, repr(record.key), with_kv, ended, pairs)


def _stored(id: str, answer: Sequence[bytes] | bytes, log: bytes | list[bytes] | None) -> Stored | Unreadable | None:
    """`answer`: names and values in turn, or the error in place of them; the log's error comes in a list."""
    if not answer:
        return None
    if isinstance(answer, bytes):
        return Unreadable(f"Redis says of its record: {answer.decode(errors='replace')}")
    if isinstance(log, list):
        return Unreadable(f"Redis says of its log: {log[0].decode(errors='replace')}")
    raw = {name.decode(errors="replace"): value for name, value in zip(answer[::2], answer[1::2], strict=True)}
    if (reason := raw.get("unreadable")) is not None:
        return Unreadable(reason.decode(errors="replace"))
    if "submit" not in raw:
        return Unreadable("its field submit is missing")
    try:
        record = fields.to_record(id, raw, log or b"")
    except fields.Malformed as error:
        return Unreadable(str(error))
    model = raw.get("model", b"").decode(errors="replace")
    return Stored(record, raw["submit"], log or b"", raw.get("ending"), model)


async def _told(call: Awaitable[Any], key: str) -> Any:
    try:
        return await call
    except OutOfMemoryError as error:
        raise StoreFull(f"Redis is out of memory: {error}") from error
    except (ResponseError, AuthenticationError) as error:
        if str(error).startswith("FENCED"):
            raise Fenced(str(error)) from error
        if str(error).startswith("LOST"):
            raise LostWrites(str(error)) from error
        code = getattr(error, "status_code", None)  # redis-py takes the codes that it knows off the text
        text = f"{code} {error}" if code else str(error)
        if text.startswith("NOREPLICAS"):
            raise TooFewReplicas(text) from error
        if text.startswith("WRONGTYPE"):
            raise WrongType(f"rename or delete what this needs, and start again: {text}{key and ': '}{key}") from error
        if text.startswith(BUSY):
            raise StoreBusy(text) from error
        raise (StoreUnavailable if text.startswith(FAILING_OVER) else StoreRefuses)(text) from error
    except (RedisError, OSError, TimeoutError) as error:
        signed_in = not isinstance(error.__cause__, AuthenticationError)  # redis-py wraps those of a new connection
        raise (StoreUnavailable if signed_in else StoreRefuses)(str(error) or type(error).__name__) from error
