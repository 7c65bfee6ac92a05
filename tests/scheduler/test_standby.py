"""When a standby may lead, on a store whose answers are scripted."""

import asyncio
import threading
from itertools import chain, repeat
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from protos.link.v1 import gateway_link_pb2 as pb
from scheduler_service.__main__ import LeaderSlot, hold
from scheduler_service.config import Settings
from scheduler_service.leader import Leader
from scheduler_service.standby import wait_to_lead
from scheduler_service.store import Fenced, MemoryStore, Pulse, StoreUnavailable
from scheduler_service.tracked import Tracked
from tests.scheduler.store.writes import record
from tests.waiting import WAIT_S, until

LEASE_S = 0.1


class Scripted(MemoryStore):
    """Gives these pulses, the last one for ever; None: it cannot be reached."""

    def __init__(self, *pulses: Pulse | None) -> None:
        super().__init__()
        self._pulses = chain(pulses, repeat(pulses[-1]))
        self.asked = 0

    async def pulse(self) -> Pulse:
        self.asked += 1
        if (pulse := next(self._pulses)) is None:
            raise StoreUnavailable("away")
        return pulse


async def waited(*pulses: Pulse | None) -> tuple[Pulse, float]:
    """What was last seen, and how long it took from the last change on."""
    clock = asyncio.get_running_loop().time
    began = clock()
    async with asyncio.timeout(WAIT_S):
        seen = await wait_to_lead(Scripted(*pulses), LEASE_S)
    return seen, clock() - began


async def test_a_leader_that_has_stepped_down_is_followed_at_once() -> None:
    store = Scripted(Pulse(7, None))
    assert await wait_to_lead(store, lease_s=3600) == Pulse(7, None)
    assert store.asked == 1


@pytest.mark.parametrize("silent", [Pulse(7, 3), Pulse(0, None)], ids=["a leader", "an empty store"])
async def test_silence_is_waited_out(silent: Pulse) -> None:
    seen, took_s = await waited(silent)
    assert seen == silent
    assert took_s >= LEASE_S


async def test_each_commit_and_each_failure_to_ask_begins_the_wait_anew() -> None:
    """For longer than the lease it commits, or cannot be asked; then, silent, it has the whole lease once more."""
    busy = [Pulse(7, number) for number in range(15)]
    seen, took_s = await waited(*busy, *[None] * 15, busy[-1])
    assert seen == busy[-1]
    assert took_s >= 30 * LEASE_S / 10 + LEASE_S


async def test_why_the_store_cannot_be_asked_is_told_once() -> None:
    with capture_logs() as logs:
        await waited(*[None] * 5, Pulse(7, None))
    assert [(each["event"], each["error"]) for each in logs] == [("store_unavailable", "away")]


class TooLate(MemoryStore):
    """Another scheduler is always faster."""

    def __init__(self) -> None:
        super().__init__()
        self.races, self.enough = 0, asyncio.Event()

    async def pulse(self) -> Pulse:
        await asyncio.sleep(0)
        return Pulse(7, None)

    async def lead(self, now_ms: int, seen: Pulse | None = None, attempt: str | None = None) -> int:
        self.races += 1
        if self.races > 3:
            self.enough.set()
        raise Fenced("another leader has taken over")


class Unready:
    """In place of the server."""

    async def set_ready(self, ready: bool) -> None:
        assert not ready


async def test_a_standby_that_comes_too_late_leaves_no_event_log_open(tmp_path: Path) -> None:
    def writers() -> int:
        return sum(thread.name == "event-log" for thread in threading.enumerate())

    before, store = writers(), TooLate()
    settings = Settings(_cli_parse_args=False, standby=True, event_log=tmp_path / "events")  # type: ignore[call-arg]
    holding = asyncio.create_task(hold(settings, store, Unready(), LeaderSlot()))  # type: ignore[arg-type]
    async with asyncio.timeout(WAIT_S):
        await store.enough.wait()
    holding.cancel()
    await asyncio.wait([holding])
    assert writers() <= before + 1  # that of the race under way


class LosesAnswers(MemoryStore):
    """What it does is done, but the answers to the first two calls of `lead` never come."""

    def __init__(self) -> None:
        super().__init__()
        self.led: list[int] = []

    async def lead(self, now_ms: int, seen: Pulse | None = None, attempt: str | None = None) -> int:
        self.led.append(await super().lead(now_ms, seen, attempt))
        if len(self.led) <= 2:
            raise StoreUnavailable("the answer was lost")
        return self.led[-1]


class AnyServer:
    """In place of the server."""

    async def set_ready(self, ready: bool) -> None:
        pass


@pytest.mark.parametrize("standby", [False, True])
async def test_a_leader_whose_answer_to_lead_was_lost_asks_again_and_leads(standby: bool) -> None:
    store, slot = LosesAnswers(), LeaderSlot()
    settings = Settings(_cli_parse_args=False, standby=standby, lease_s=0.3)  # type: ignore[call-arg]
    holding = asyncio.create_task(hold(settings, store, AnyServer(), slot))  # type: ignore[arg-type]

    async def leads() -> bool:
        return slot.leader is not None

    await until(leads)
    assert slot.leader is not None
    assert store.led == 3 * [slot.leader.epoch]  # nobody was fenced, and no lease had to run out
    holding.cancel()
    await asyncio.wait([holding])
    await slot.leader.close()


class BreaksOff(LosesAnswers):
    """Fails once more, after a scheduler has begun to lead."""

    async def learned(self) -> bytes | None:
        if len(self.led) == 3:
            raise StoreUnavailable("away")
        return None


def a_leader(store: MemoryStore) -> Leader:
    return Leader(Settings(_cli_parse_args=False), store)  # type: ignore[call-arg]


async def tried(leader: Leader, times: int, seen: Pulse | None = None) -> None:
    for _ in range(times):
        with pytest.raises(StoreUnavailable):
            await leader.lead(seen)


async def test_a_scheduler_that_had_begun_to_lead_when_the_store_went_away_leads_when_it_is_back() -> None:
    """It is not fenced by its own epoch: nobody else has led since."""
    store = BreaksOff()
    leader, seen = a_leader(store), await store.pulse()
    await tried(leader, 3, seen)
    await leader.lead(seen)
    assert leader.epoch == store.led[3] > store.led[2]
    leader.persisting.cancel()


async def test_a_scheduler_that_had_begun_to_lead_is_fenced_if_another_has_led_since() -> None:
    store = BreaksOff()
    leader, seen = a_leader(store), await store.pulse()
    await tried(leader, 3, seen)
    await store.lead(0)
    with pytest.raises(Fenced):
        await leader.lead(seen)


async def test_what_an_earlier_attempt_has_read_is_not_written_over_what_another_leader_made_of_it() -> None:
    store = BreaksOff()
    leader = a_leader(store)
    await tried(leader, 3)
    leader.ledger.live["a"] = Tracked(pb.Submit(request_id="a"), record("a"))
    await store.lead(0)
    with pytest.raises(Fenced):
        await leader.lead()


async def test_a_server_that_holds_more_than_was_there_before_a_lost_answer_is_not_written_over() -> None:
    store = LosesAnswers()
    store._epoch, store._commit = 5, 7
    leader = a_leader(store)
    await tried(leader, 2)
    await leader.lead()
    store._epoch, store._commit = 5, 8  # another server, which the leader before had written to last
    await asyncio.wait([leader.persisting], timeout=WAIT_S)
    with pytest.raises(Fenced, match="holds writes that the leader has not read"):
        leader.persisting.result()
