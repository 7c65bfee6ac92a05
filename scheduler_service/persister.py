"""Writes to the store in the background and in order, says what became durable, and repeats what the store lost."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

import structlog

from protos.metrics import PER_STEP_S, Distribution
from protos.outage import Outage
from scheduler_service.store import (
    LostWrites,
    Pulse,
    Store,
    StoreFull,
    StoreRefuses,
    StoreUnavailable,
    Verdict,
    Write,
)

Batch = Sequence[Write]
MAX_WRITES_PER_COMMIT = 256  # the scheduler and Redis do nothing else while they handle one commit
MAX_WHOLE = 64  # requests rewritten at once: until the store has all of a part it looks as if nobody led
MAX_BYTES = 4 << 20  # of either, but for a last write or batch: the store must have answered by its timeout
BEAT_S = 0.25  # an empty commit after so long without one shows that the leader lives, and whether the store lost any
REFUSED_S = 5.0  # after so long without a commit a refusal of the store is no passing trouble
RETRY_S, MAX_RETRY_S = 0.05, 0.25  # pauses between attempts: each is twice as long as the one before


class Durable(Protocol):
    """Keeps account of what the store has acknowledged."""

    async def durable(self, written: Iterable[tuple[Write, Verdict]]) -> None:
        """These writes were committed, in this order."""

    def concerns(self, write: Write) -> bool:
        """Whether it is still to be written."""

    def everything(self) -> Iterable[Write]:
        """All that the store has acknowledged and may have lost, each request whole. It does not change before the next
        call of `durable`."""


class Persister:
    """`max_pending`: reports of one worker that may wait for the store until its planning has to wait, too.
    `rewritten` is called when a store that had lost something holds everything again."""

    def __init__(self, store: Store, max_pending: int, ledger: Durable, rewritten: Callable[[], None]) -> None:
        self._store, self._max_pending = store, max_pending
        self._ledger, self._rewritten = ledger, rewritten
        self._epoch = 0
        self._before: Pulse | None = None
        self._commits = 0  # acknowledged by the store
        self.acknowledged = asyncio.Event()  # set by the first commit
        self._answered_at = 0.0  # by the loop's clock: the last commit
        self._lost = False  # the store had lost something, and has not said yet that it holds everything again
        self.refusal = ""  # why the store has refused every commit for REFUSED_S; a person has to mend that
        self._outage = Outage()
        self._parts = -1  # the number of the last part of a rewriting
        self._pending: deque[tuple[Batch, str | None, float]] = deque()
        self.lag = Distribution(PER_STEP_S)  # of each commit: how long its oldest batch has waited to become durable
        self._reports: Counter[str] = Counter()  # pending batches that are reports, by worker
        self._work = asyncio.Event()
        self._progress = asyncio.Event()  # replaced after each commit

    @property
    def silent_s(self) -> float:
        """Seconds since the store answered; it is asked at least every BEAT_S."""
        return asyncio.get_running_loop().time() - self._answered_at if self.acknowledged.is_set() else 0.0

    @property
    def behind(self) -> int:
        """How many batches wait for the store."""
        return len(self._pending)

    @property
    def behind_without_reports(self) -> int:
        """How many of them are no worker's report. Reports have a bound of their own: `max_pending` for each worker."""
        return len(self._pending) - self._reports.total()

    def full(self, worker: str) -> bool:
        """Planning for this worker has to wait: `max_pending` of its reports are on their way to the store."""
        return self._reports[worker] >= self._max_pending

    async def room(self, worker: str) -> None:
        """Returns when planning for this worker may go on."""
        while self.full(worker):
            await self._progress.wait()

    def put(self, batch: Batch, worker: str | None = None) -> None:
        """Never waits. `worker`: whose report it is, if it is one.

        The callers bound how much waits: a worker reports at most `max_lag` rounds without a new plan, and each live
        request is submitted and ended once.
        """
        self._pending.append((batch, worker, time.perf_counter()))
        if worker is not None:
            self._reports[worker] += 1
        self._work.set()

    async def run(self, epoch: int, before: Pulse | None = None) -> None:
        """Commit as the leader of this epoch, until cancelled. `before`: the pulse when it took over. Raises Fenced
        when another leader took over, or if the store holds more than this leader has read."""
        self._epoch, self._before, self._commits, self._lost, self._parts = epoch, before, 0, False, -1
        self.acknowledged.clear()
        self._work.set()  # the first commit is made at once
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(BEAT_S):
                    await self._work.wait()
            await self._commit_some()
            if not self._pending:
                self._work.clear()

    async def _commit_some(self) -> None:
        """As many batches as fit into one commit: under load each costs less, and none waits for more to come."""
        writes: list[Write] = []
        taken = size = 0
        for batch, _, _ in self._pending:
            if taken and (len(writes) + len(batch) > MAX_WRITES_PER_COMMIT or size >= MAX_BYTES):
                break
            ours = list(filter(self._ledger.concerns, batch))
            writes += ours
            size += sum(map(_bytes, ours))
            taken += 1
        verdicts = await self._commit(writes)
        await self._ledger.durable(zip(writes, verdicts, strict=True))
        if taken:
            self.lag.observe(time.perf_counter() - self._pending[0][-1])
        for _ in range(taken):
            _, worker, _ = self._pending.popleft()
            if worker is not None:
                self._reports[worker] -= 1
                if not self._reports[worker]:
                    del self._reports[worker]
        self._progress.set()
        self._progress = asyncio.Event()

    async def _commit(self, writes: list[Write], *, full: bool = False) -> list[Verdict]:
        """`full`: a commit without writes while the store has no room for any. Its success ends no outage."""
        wait_s = RETRY_S  # not tenacity: it leaves reference cycles behind after each commit
        refused_s = 0.0
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            try:
                verdicts = await self._commit_once(writes)
                self.refusal, self._answered_at = "", clock()
                if not full and self._outage.over():
                    structlog.get_logger().info("store_answers")
                self.acknowledged.set()
                return verdicts
            except StoreUnavailable as error:
                if self._outage.is_new(str(error)):
                    structlog.get_logger().warning("store_unavailable", error=str(error))
                if error.answered:
                    self._answered_at = clock()
                refused_s = refused_s + clock() - began + wait_s if isinstance(error, StoreRefuses) else 0.0
                if refused_s >= REFUSED_S and not self.refusal:
                    self.refusal = str(error)
                    structlog.get_logger().error("store_refuses", reason=self.refusal)
                if isinstance(error, StoreFull) and writes:  # nothing of it was written, and its number is free
                    # It shows that this leader lives: a standby could write no more than it.
                    await self._commit([], full=True)
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
        """The store was restarted, or somebody deleted keys. As long as this leader lives it writes all of it again."""
        structlog.get_logger().error("store_lost_writes", what=lost)
        whole = iter(self._ledger.everything())
        follows, part = self._commits, await _some(whole)
        while next_part := await _some(whole):
            self._parts -= 1
            await self._store.rewrite(self._epoch, self._parts, follows, part, self._before)
            follows, part = self._parts, next_part
            self._answered_at = asyncio.get_running_loop().time()
        await self._store.rewrite(self._epoch, self._commits, follows, part, self._before)


async def _some(whole: Iterator[Write]) -> list[Write]:
    """The next part. Each is decoded when it is asked for; other tasks run in between."""
    some: list[Write] = []
    size = 0
    while len(some) < MAX_WHOLE and size < MAX_BYTES and (write := next(whole, None)) is not None:
        some.append(write)
        size += _bytes(write)
        await asyncio.sleep(0)
    return some


def _bytes(write: Write) -> int:
    return len(write.log) + len(write.submit or b"")
