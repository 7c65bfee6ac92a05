"""After a change of leaders: the order in which stored requests are read while the store, or one of them, cannot be."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from unittest.mock import AsyncMock

import pytest
from structlog.testing import capture_logs

from scheduler_service.recovery import Recovery
from scheduler_service.store import MemoryStore, Stored, StoreUnavailable, Unreadable
from tests.scheduler.store.writes import created
from tests.waiting import until


class Failing(MemoryStore):
    """Reads none of the ids that `fails` names, and notes which it reads, and after how many failures."""

    def __init__(self, fails: Callable[[str], bool]) -> None:
        super().__init__()
        self.fails, self.failures, self.got = fails, 0, dict[str, int]()

    async def read(self, ids: Sequence[str]) -> list[Stored | Unreadable | None]:
        if any(map(self.fails, ids)):
            self.failures += 1
            raise StoreUnavailable("away")
        self.got |= dict.fromkeys(ids, self.failures)
        return await super().read(ids)


@asynccontextmanager
async def recovering(
    store: MemoryStore, count: int, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Recovery, list[str]]]:
    """Of so many requests, and all of their ids in the order of the index."""
    monkeypatch.setattr("scheduler_service.recovery.RETRY_S", 0)
    reign = await created(store, *(f"r{number}" for number in range(count)))
    recovery = Recovery(store, AsyncMock(), known=lambda id: False)
    await recovery.begin(reign.epoch)
    order = list(recovery.unread)
    running = asyncio.create_task(recovery.run())
    yield recovery, order
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_one_that_can_never_be_read_keeps_no_other_from_being_read_and_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Failing(lambda id: id == "r0")

    async def tried_again() -> bool:
        return len(store.got) == 19 and store.failures > 10

    with capture_logs() as logs:
        async with recovering(store, 20, monkeypatch) as (recovery, _):
            await until(tried_again)
    assert list(recovery.unread) == ["r0"]
    assert [each["error"] for each in logs if each["event"] == "not_recovered"] == ["away"]


async def test_a_store_that_was_away_for_a_while_gives_the_best_claims_first(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Failing(lambda id: True)

    async def tried() -> bool:
        return store.failures >= 20

    async def done() -> bool:
        return len(store.got) == 100

    async with recovering(store, 100, monkeypatch) as (_, order):
        await until(tried)
        store.fails = lambda id: False
        await until(done)
    first, *others = store.got  # whose answer says that the store is back
    order.remove(first)
    assert others == order


async def test_several_that_can_never_be_read_keep_no_other_waiting_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    store, bad = Failing(lambda id: id in bad), {"r0", "r1", "r2", "r9"}

    async def done() -> bool:
        return len(store.got) == 196

    async with recovering(store, 200, monkeypatch) as (recovery, _):
        await until(done)
        assert recovery.unread.keys() == bad
    assert sorted(store.got.values())[150] <= 10


async def test_one_that_can_never_be_read_keeps_no_unreadable_one_from_being_set_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, unreadable = Failing(lambda id: id == "r0"), list[str]()

    async def set_aside(epoch: int, id: str, reason: str) -> None:
        unreadable.append(id)

    async def left() -> bool:
        return recovery.unread.keys() == {"r0"}

    async def done() -> bool:
        return unreadable == ["r1"]

    monkeypatch.setattr(store, "set_aside", set_aside)
    async with recovering(store, 2, monkeypatch) as (recovery, _):
        await until(left)
        recovery.set_aside.found("r1", Unreadable("as somebody who asked for it found"))
        await until(done)
