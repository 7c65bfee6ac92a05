"""What is written to a store that loses things, and who is told of it."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from protos.link.v1 import gateway_link_pb2 as pb
from scheduler_service.ledger import Ledger
from scheduler_service.persister import MAX_BYTES, Persister
from scheduler_service.store import (
    MemoryStore,
    Pulse,
    StoreBusy,
    StoreFull,
    StoreRefuses,
    StoreUnavailable,
    TooFewReplicas,
    Verdict,
    Write,
)
from scheduler_service.tracked import Tracked
from tests.scheduler.live import WAIT_S
from tests.scheduler.store.writes import submission, tokens
from tests.waiting import until


def ours(ledger: Ledger, id: str) -> Write:
    """The first write of a request that is live."""
    write = submission(id)
    ledger.live[id] = Tracked(pb.Submit(request_id=id), write.record)
    return write


class Forgetful(MemoryStore):
    """Loses its commits, and the answer that it holds everything again."""

    told = False

    def __init__(self) -> None:
        super().__init__()
        self.written = asyncio.Event()

    async def commit(self, epoch: int, number: int, writes: Sequence[Write]) -> list[Verdict]:
        verdicts = await super().commit(epoch, number, writes)
        self.written.set()
        return verdicts

    async def rewrite(
        self, epoch: int, number: int, follows: int, writes: Sequence[Write], before: Pulse | None = None
    ) -> None:
        await super().rewrite(epoch, number, follows, writes, before)
        if not self.told:
            self.told = True
            raise StoreUnavailable("timed out")

    def forget(self) -> None:
        self._commit = 0


async def test_a_store_that_went_back_is_read_again_though_the_answer_to_its_rewriting_was_lost() -> None:
    """(Simulated faults, seed 403967.)"""
    store, rewritten = Forgetful(), asyncio.Event()
    ledger = Ledger(store, lambda id: None)
    persister = Persister(store, 1, ledger, rewritten.set)
    running = asyncio.create_task(persister.run(await store.lead(1)))
    async with asyncio.timeout(WAIT_S):
        await store.written.wait()
        store.forget()
        await rewritten.wait()
    assert store.told
    running.cancel()
    await asyncio.wait([running])


async def test_reports_of_many_workers_do_not_count_as_submissions_that_the_store_is_behind_with() -> None:
    store = MemoryStore()
    persister = Persister(store, 16, Ledger(store, lambda id: None), lambda: None)
    persister.put([submission("a")])
    for number in range(64):
        persister.put([submission(f"of {number}")], worker=f"worker-{number}")
    assert (persister.behind, persister.behind_without_reports) == (65, 1)


class Refusing(MemoryStore):
    """Refuses commits while `refuses` says why."""

    refuses = "NOPERM this user has no permissions"

    async def commit(self, epoch: int, number: int, writes: Sequence[Write]) -> list[Verdict]:
        if self.refuses:
            raise StoreRefuses(self.refuses)
        return await super().commit(epoch, number, writes)


async def test_why_a_store_refuses_is_told_until_it_takes_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_service.persister.REFUSED_S", 0.0)
    store = Refusing()
    persister = Persister(store, 1, Ledger(store, lambda id: None), lambda: None)
    running = asyncio.create_task(persister.run(await store.lead(1)))

    async def refused() -> bool:
        return "NOPERM" in persister.refusal

    async def accepted() -> bool:
        return not persister.refusal

    with capture_logs() as logs:
        await until(refused)
        store.refuses = ""
        await until(accepted)
    told = [line["event"] for line in logs]
    assert told == ["store_unavailable", "store_refuses", "store_answers"]  # once, however often it is tried
    running.cancel()
    await asyncio.wait([running])


async def test_a_worker_waits_for_its_own_reports_alone() -> None:
    store = MemoryStore()
    persister = Persister(store, 2, Ledger(store, lambda id: None), lambda: None)
    for worker in ("busy", "other", "busy"):
        persister.put([], worker)
    assert [persister.full(worker) for worker in ("busy", "other", "new")] == [True, False, False]


class Full(MemoryStore):
    """Takes only commits without writes until there is room, and loses its answer to the first of these."""

    def __init__(self) -> None:
        super().__init__()
        self.beats = 0
        self.room = False

    async def commit(self, epoch: int, number: int, writes: Sequence[Write]) -> list[Verdict]:
        if writes and not self.room:
            raise StoreFull("out of memory")
        verdicts = await super().commit(epoch, number, writes)
        if not writes:
            self.beats += 1
            if self.beats == 1:
                raise StoreUnavailable("timed out")
            self.room = self.beats > 2
        return verdicts


async def test_commits_without_writes_take_no_number_from_one_that_waits_for_memory() -> None:
    """A commit under the number of one that was written before would be taken for its repetition, and get lost."""
    store = Full()
    told = asyncio.Event()

    class Told(Ledger):
        async def durable(self, written: Sequence[tuple[Write, Verdict]]) -> None:
            if written:
                told.set()

    ledger = Told(store, lambda id: None)
    persister = Persister(store, 1, ledger, lambda: None)
    running = asyncio.create_task(persister.run(await store.lead(1)))
    persister.put([ours(ledger, "a")])
    with capture_logs() as logs:
        async with asyncio.timeout(WAIT_S):
            await told.wait()
    causes = [line.get("error", line["event"]) for line in logs]
    assert causes == ["out of memory", "timed out", "store_answers"]  # not after each commit of nothing
    assert store.beats > 2
    assert list(store.requests) == ["a"]
    running.cancel()
    await asyncio.wait([running])


async def test_what_is_left_of_a_request_that_is_no_longer_ours_holds_up_nobody() -> None:
    """The store has said that another request of its id was there first, and has forgotten that one since."""
    store = MemoryStore()
    ledger = Ledger(store, lambda id: None)
    persister = Persister(store, 1, ledger, lambda: None)
    persister.put([tokens("withdrawn", 0, 10)], worker="w")
    persister.put([ours(ledger, "b")])
    running = asyncio.create_task(persister.run(await store.lead(1)))

    async def written() -> bool:
        return ledger.live["b"].stored

    await until(written)
    assert list(store.requests) == ["b"]
    running.cancel()
    await asyncio.wait([running])


class Rewritten(Forgetful):
    """Counts the bytes of each part."""

    told = True

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[list[int]] = []

    async def rewrite(
        self, epoch: int, number: int, follows: int, writes: Sequence[Write], before: Pulse | None = None
    ) -> None:
        self.parts.append([len(write.log) for write in writes])
        self._epoch, self._commit = epoch, number


class Heavy(Ledger):
    def everything(self) -> Iterator[Write]:
        for id, size in zip("abcd", (HALF, HALF, 3 * HALF, 1), strict=True):
            yield replace(submission(id), log=bytes(size))


HALF = MAX_BYTES // 2


async def test_a_part_of_a_rewriting_ends_before_it_is_long_under_way() -> None:
    store, rewritten = Rewritten(), asyncio.Event()
    persister = Persister(store, 1, Heavy(store, lambda id: None), rewritten.set)
    running = asyncio.create_task(persister.run(await store.lead(1)))
    async with asyncio.timeout(WAIT_S):
        await store.written.wait()
        store.forget()
        await rewritten.wait()
    assert store.parts == [[HALF, HALF], [3 * HALF], [1]]
    running.cancel()
    await asyncio.wait([running])


class Counted(MemoryStore):
    """Takes note of how many bytes of prompts it was given at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    async def commit(self, epoch: int, number: int, writes: Sequence[Write]) -> list[Verdict]:
        self.sizes += [sum(len(write.submit or b"") for write in writes)] if writes else []
        return await super().commit(epoch, number, writes)


async def test_a_commit_ends_before_it_is_long_under_way() -> None:
    """Each batch goes whole, however large it is."""
    store = Counted()
    ledger = Ledger(store, lambda id: None)
    persister = Persister(store, 1, ledger, lambda: None)
    sizes = {"a": 1, "b": HALF, "c": HALF, "d": 3 * HALF, "e": 1}
    for id, size in sizes.items():
        persister.put([replace(ours(ledger, id), submit=bytes(size))])
    running = asyncio.create_task(persister.run(await store.lead(1)))

    async def done() -> bool:
        return not persister.behind

    await until(done)
    assert store.sizes == [1 + HALF + HALF, 3 * HALF, 1]
    running.cancel()
    await asyncio.wait([running])


class Failing(MemoryStore):
    """Answers every commit after the first with an error."""

    def __init__(self, error: type[StoreUnavailable]) -> None:
        super().__init__()
        self._error, self.asked = error, 0

    async def commit(self, epoch: int, number: int, writes: Sequence[Write]) -> list[Verdict]:
        self.asked += 1
        if self.asked > 1:
            raise self._error("so it is")
        return await super().commit(epoch, number, writes)


@pytest.mark.parametrize(
    ("error", "answers"),
    [(StoreRefuses, True), (StoreBusy, True), (TooFewReplicas, False), (StoreUnavailable, False)],
)
async def test_only_a_store_that_does_not_answer_may_be_led_by_another(
    error: type[StoreUnavailable], answers: bool
) -> None:
    """A primary that is cut off from its Sentinels says that it has too few replicas."""
    store, now = Failing(error), asyncio.get_running_loop().time
    persister = Persister(store, 16, Ledger(store, lambda id: None), lambda: None)
    running = asyncio.create_task(persister.run(await store.lead(1)))
    async with asyncio.timeout(WAIT_S):
        await persister.acknowledged.wait()
        acknowledged_at, asked = now(), store.asked

        async def asked_again() -> bool:
            return store.asked >= asked + 3

        await until(asked_again)
    asked_at = now()  # first, so that an answer is taken for older than it is, by microseconds
    assert (asked_at - persister.silent_s > acknowledged_at) == answers
    running.cancel()
    await asyncio.wait([running])
