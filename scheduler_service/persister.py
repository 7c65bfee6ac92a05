"""Writes to the store in the background and in order, then says what became durable. It decides nothing."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import structlog
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential

from scheduler_service.store import Store, StoreUnavailable, Verdict, Write

Batch = Sequence[Write]
Durable = Callable[[Sequence[tuple[Write, Verdict]]], Awaitable[None]]
MAX_WRITES_PER_COMMIT = 512


class Persister:
    """One batch per report. `durable` is told of every write, in order, after the commit that holds it."""

    def __init__(self, store: Store, epoch: int, max_pending: int, durable: Durable) -> None:
        self._store, self._epoch, self._max_pending, self._durable = store, epoch, max_pending, durable
        self._pending: deque[tuple[Batch, bool]] = deque()
        self._planned = 0
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    @property
    def full(self) -> bool:
        """Planning has to wait: as many reports are on their way as the settings allow."""
        return not self._room.is_set()

    async def room(self) -> None:
        await self._room.wait()

    @property
    def behind(self) -> int:
        """How many batches are on their way."""
        return len(self._pending)

    def put(self, batch: Batch, *, planned: bool = False) -> None:
        """Never waits. `planned`: a report's, which counts against `max_pending`.

        Bounded by its callers: a worker reports at most `max_lag` rounds without a new plan, and each live request is
        submitted and ended once.
        """
        self._pending.append((batch, planned))
        self._planned += planned
        self._work.set()
        if self._planned >= self._max_pending:
            self._room.clear()

    async def run(self) -> None:
        """Until cancelled. Raises Fenced when another leader took over."""
        while True:
            await self._work.wait()
            await self._commit_some()
            if not self._pending:
                self._work.clear()
            if self._planned < self._max_pending:
                self._room.set()

    async def _commit_some(self) -> None:
        """As many batches as fit into one commit: under load each costs less, and none waits for company."""
        writes: list[Write] = []
        taken = 0
        for batch, _ in self._pending:
            if taken and len(writes) + len(batch) > MAX_WRITES_PER_COMMIT:
                break
            writes += batch
            taken += 1
        if writes:
            verdicts = await self._commit(writes)
            await self._durable(list(zip(writes, verdicts, strict=True)))
        for _ in range(taken):
            _, planned = self._pending.popleft()
            self._planned -= planned

    async def _commit(self, writes: list[Write]) -> list[Verdict]:
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(StoreUnavailable),
            wait=wait_exponential(multiplier=0.05, max=1.0),
            before_sleep=_warn,
        ):
            with attempt:
                return await self._store.commit(self._epoch, writes)
        raise AssertionError("retried for ever")


def _warn(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    structlog.get_logger().warning("store_unavailable", attempt=state.attempt_number, error=str(error))
