"""Writes to the store in the background and in order, then says what became durable; gives it again what it lost."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import structlog

from scheduler_service.ledger import Ledger
from scheduler_service.store import LostWrites, Store, StoreUnavailable, Verdict, Write

Batch = Sequence[Write]
MAX_WRITES_PER_COMMIT = 256  # both scheduler and Redis do nothing else meanwhile
BEAT_S = 0.25  # with nothing to write an empty commit is made, which shows that we live and whether anything is lost
RETRY_S, MAX_RETRY_S = 0.05, 0.25  # between attempts, of which each waits twice as long as the one before


class Persister:
    """One batch per report. `ledger` is told of every write, in order, after the commit that holds it; `rewritten` is
    called when a store that had lost something holds everything again."""

    def __init__(
        self, store: Store, epoch: int, max_pending: int, ledger: Ledger, rewritten: Callable[[], None]
    ) -> None:
        self._store, self._epoch, self._max_pending = store, epoch, max_pending
        self._ledger, self._rewritten = ledger, rewritten
        self._commits = 0  # acknowledged
        self._lost = False  # the store had lost something; the answer that says it holds it again may get lost, too
        self._parts = -1  # the number of the last part of a rewriting
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
            with suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
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
        verdicts = await self._commit(writes)
        await self._ledger.durable(list(zip(writes, verdicts, strict=True)))
        for _ in range(taken):
            _, planned = self._pending.popleft()
            self._planned -= planned

    async def _commit(self, writes: list[Write]) -> list[Verdict]:
        wait_s = RETRY_S  # not tenacity, which leaves reference cycles behind each commit
        while True:
            try:
                return await self._commit_once(writes)
            except StoreUnavailable as error:
                structlog.get_logger().warning("store_unavailable", error=str(error))
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_RETRY_S)

    async def _commit_once(self, writes: list[Write]) -> list[Verdict]:
        try:
            verdicts = await self._store.commit(self._epoch, self._commits + 1, writes)
        except LostWrites as lost:
            self._lost = True
            await self._rewrite(str(lost))
            verdicts = await self._store.commit(self._epoch, self._commits + 1, writes)
        self._commits += 1
        if self._lost:
            self._lost = False
            self._rewritten()
        return verdicts

    async def _rewrite(self, lost: str) -> None:
        """It was restarted, or somebody deleted keys. Nothing of this leader's is lost as long as it lives."""
        whole = self._ledger.everything()
        structlog.get_logger().error("store_lost_writes", what=lost, rewriting=len(whole))
        follows = self._commits
        while len(whole) > MAX_WRITES_PER_COMMIT:
            self._parts -= 1
            await self._store.rewrite(self._epoch, self._parts, follows, whole[:MAX_WRITES_PER_COMMIT])
            follows, whole = self._parts, whole[MAX_WRITES_PER_COMMIT:]
        await self._store.rewrite(self._epoch, self._commits, follows, whole)
