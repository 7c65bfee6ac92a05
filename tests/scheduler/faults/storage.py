"""The store behind a wire: answers are late or lost, writes land after all, the server goes away, hangs, or comes back
without its last writes. What it holds is scheduler_service.store.MemoryStore, and checked after each write.
"""

import asyncio
import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

from scheduler_service.store import Index, MemoryStore, Pulse, Stored, StoreUnavailable, Unreadable, Verdict, Write
from tests.scheduler.faults.loop import VirtualLoop
from tests.scheduler.faults.promise import Promise

TIMEOUT_S = 2.0  # of RedisStore
HISTORY_S = 2.0  # what a server that syncs every second may lose


class StoreServer:
    """One server, whatever process asks."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, promise: Promise) -> None:
        self.loop, self.rng = loop, rng
        self.store = MemoryStore(clock=loop.time)
        self.away_until = self.hangs_until = 0.0
        self.troubled_until = 0.0
        self.trouble = ""
        self.faults: dict[str, int] = {}  # operations that met one, by kind
        self.history: list[tuple[float, MemoryStore]] = [(0.0, copy.copy(self.store))]
        self.led = (0, 0.0)  # the last epoch, and since when
        self.first_led = 0.0
        self.unwritten = 0  # the epoch of a leader that has to write anew what was lost
        self._promise = promise

    def ask(self, name: str, args: tuple[Any, ...]) -> "asyncio.Future[Any]":
        """What a connection would bring; it may bring nothing at all."""
        answer: asyncio.Future[Any] = self.loop.create_future()
        rng, now = self.rng, self.loop.now
        when = now + rng.uniform(0.0001, 0.001)
        trouble = self.trouble if now < self.troubled_until and rng.random() < 0.5 else ""
        if now < self.away_until:
            self._at(when, _fail, answer, "connection refused")
            return answer
        if trouble:
            self.faults[trouble] = self.faults.get(trouble, 0) + 1
        if trouble == "refused":
            self._at(when, _fail, answer, "connection reset before it was sent")
            return answer
        if trouble == "late":
            when += rng.expovariate(1.0)
        self._at(max(when, self.hangs_until), self._do, name, args, answer, trouble == "unanswered")
        return answer

    def _at(self, when: float, callback: Callable[..., None], *args: Any) -> None:
        self.loop.at(when, callback, *args)

    def _do(self, name: str, args: tuple[Any, ...], answer: "asyncio.Future[Any]", unanswered: bool) -> None:
        now = self.loop.now
        if now < self.hangs_until:  # it stopped meanwhile
            self._at(self.hangs_until, self._do, name, args, answer, unanswered)
            return
        if now < self.away_until:
            _fail(answer, "connection reset")
            return
        try:
            result = _at_once(getattr(self.store, name)(*args))
        except Exception as error:
            self._at(now + 0.0005, _raise, answer, error)
            return
        if name == "rewrite" and args[0] == self.unwritten and args[1] >= 0:
            self.unwritten = 0
        if name == "lead":
            self._promise.excused |= self.unwritten > 0
            self.led = (result, now)
            self.first_led = self.first_led or now
        if name in ("commit", "rewrite", "lead"):
            self._promise.written(self.store)
            self.history.append((now, copy.copy(self.store)))
            while self.history[1:] and self.history[1][0] < now - HISTORY_S:
                del self.history[0]
        if unanswered:
            self._at(now + self.rng.choice((0.0005, TIMEOUT_S)), _fail, answer, "connection reset before it answered")
        else:
            if name == "commit" and not answer.done():
                self._promise.heard(write.record.request.id for write in args[2])
            if name == "read" and not answer.done():
                self._promise.heard(args[0])
            self._at(now + self.rng.uniform(0.0001, 0.001), _set, answer, result)

    def forget(self, seconds: float | None) -> None:
        """It comes back as it was so many seconds ago; None: empty."""
        then = self.loop.now - (seconds or 0.0)
        kept = [copy.copy(store) for at, store in self.history if at <= then]
        self.store = MemoryStore(clock=self.loop.time) if seconds is None or not kept else kept[-1]
        self.history = [(self.loop.now, copy.copy(self.store))]
        self._promise.lost(self.store)


def _at_once(call: Any) -> Any:
    """The result of a coroutine that never waits."""
    try:
        call.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("the store in memory waits for nothing")


def _set(answer: "asyncio.Future[Any]", result: Any) -> None:
    if not answer.done():
        answer.set_result(result)


def _raise(answer: "asyncio.Future[Any]", error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)


def _fail(answer: "asyncio.Future[Any]", reason: str) -> None:
    _raise(answer, StoreUnavailable(reason))


class StorePort:
    """One process's store, in place of RedisStore."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server

    async def _ask(self, name: str, *args: Any) -> Any:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._server.ask(name, args)
        except TimeoutError as error:
            raise StoreUnavailable("timed out") from error

    async def lead(self, now_ms: int, seen: Pulse | None = None, attempt: str | None = None) -> int:
        epoch: int = await self._ask("lead", now_ms, seen, attempt)
        return epoch

    async def pulse(self) -> Pulse:
        pulse: Pulse = await self._ask("pulse")
        return pulse

    async def step_down(self, epoch: int) -> None:
        await self._ask("step_down", epoch)

    async def commit(self, epoch: int, number: int, writes: Sequence[Write]) -> list[Verdict]:
        verdicts: list[Verdict] = await self._ask("commit", epoch, number, tuple(writes))
        return verdicts

    async def rewrite(
        self, epoch: int, number: int, follows: int, writes: Sequence[Write], before: Pulse | None = None
    ) -> None:
        await self._ask("rewrite", epoch, number, follows, tuple(writes), before)

    async def index(self) -> Index:
        index: Index = await self._ask("index")
        return index

    async def read(self, ids: Sequence[str]) -> list[Stored | Unreadable | None]:
        stored: list[Stored | Unreadable | None] = await self._ask("read", tuple(ids))
        return stored

    async def get(self, id: str) -> Stored | Unreadable | None:
        return (await self.read([id]))[0]

    async def set_aside(self, epoch: int, id: str, reason: str) -> None:
        await self._ask("set_aside", epoch, id, reason)

    async def save_learned(self, epoch: int, learned: bytes) -> None:
        await self._ask("save_learned", epoch, learned)

    async def learned(self) -> bytes | None:
        learned: bytes | None = await self._ask("learned")
        return learned

    async def close(self) -> None:
        return
