"""Gateways send requests to a leader whose store takes its time."""

import asyncio
from collections.abc import Sequence

from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import gateway_link_pb2 as pb
from scheduler_service.core.types import Unseen
from scheduler_service.pace import UNITS, Turns
from scheduler_service.store import MemoryStore, Stored, StoreUnavailable, Unreadable, Verdict, Write
from scheduler_service.tracked import Tracked
from scheduler_service.worker_pool import MODEL_STAYS_S
from tests.scheduler.live import ScriptedGateway, ScriptedWorker, scheduler
from tests.scheduler.store.writes import Reign, record
from tests.waiting import until


class Slow(MemoryStore):
    """Commits of writes, and reads, wait until they may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.writes, self.reads = asyncio.Event(), asyncio.Event()

    async def commit(self, epoch: int, number: int, writes: Sequence[Write]) -> list[Verdict]:
        if writes:
            await self.writes.wait()
        return await super().commit(epoch, number, writes)

    async def read(self, ids: Sequence[str]) -> list[Stored | Unreadable | None]:
        await self.reads.wait()
        return await super().read(ids)


class Held(Turns):
    """The event loop has no room for anybody."""

    def __init__(self) -> None:
        super().__init__(UNITS)
        self.asked, self.free = 0, asyncio.Event()

    async def room(self, units: int) -> None:
        self.asked += 1
        await self.free.wait()


async def test_of_two_that_send_the_same_request_before_it_is_durable_both_hear_that_it_is() -> None:
    """The second one must not wait for its turn: the store may answer meanwhile."""
    store, turns = Slow(), Held()
    async with scheduler(store) as (leader, target):
        worker = await ScriptedWorker(target).attach()
        gateways = [ScriptedGateway(target), ScriptedGateway(target)]
        for gateway in gateways:
            await gateway.until(lambda gateway=gateway: gateway.serving.ready)
        leader.ledger._turns = turns
        await gateways[0].submit("a")

        async def submitted() -> bool:
            return "a" in leader.ledger.live

        async def both() -> bool:
            return turns.asked > 0 or len(leader.ledger.live["a"].followers) == 2

        await until(submitted)
        await gateways[1].submit("a")
        await until(both)
        store.writes.set()
        await gateways[0].until(lambda: "a" in gateways[0].accepted)
        turns.free.set()
        await gateways[1].until(lambda: "a" in gateways[1].accepted)
        for peer in (worker, *gateways):
            await peer.close()


class Away(MemoryStore):
    """Answers no question after a request."""

    asked = 0

    async def get(self, id: str) -> Stored | Unreadable | None:
        self.asked += 1
        raise StoreUnavailable("away")


async def test_a_follow_of_what_is_forgotten_while_it_waits_for_its_turn_cuts_no_link() -> None:
    """When it came the request had ended just now, so that the store was not to be asked."""
    turns = Held()
    async with scheduler(Away()) as (leader, target):
        gateway = ScriptedGateway(target)
        leader.ledger._turns = turns
        leader.ledger._ended["a"] = Tracked(pb.Submit(request_id="a"), record("a"), stored=True, ending=b"")
        await gateway.follow("a")

        async def waits() -> bool:
            return turns.asked > 0

        await until(waits)
        leader.ledger._ended.clear()
        turns.free.set()
        await gateway.until(lambda: "a" in gateway.refused)
        assert gateway.refused["a"].retry_after_s > 0
        await gateway.heard_all()
        await gateway.close()


async def test_however_many_follow_a_store_that_is_away_is_asked_for_one_of_them() -> None:
    """Each costs seconds, and the last would hear after hours that it is to come again."""
    async with scheduler(store := Away()) as (_, target):
        gateway = ScriptedGateway(target)
        follows = pb.Follows(follow=[pb.Follow(request_id=id) for id in "abc"])
        await gateway.call.write(pb.FromGateway(follows=follows))
        await gateway.until(lambda: len(gateway.refused) == 3)
        assert store.asked == 1
        await gateway.close()


async def left_unread(*ids: str) -> Slow:
    """What an earlier leader left: four tokens of prompt, up to nine of output."""
    store, limits = Slow(), common_pb.Limits(max_tokens=9)
    store.writes.set()
    submits = [pb.Submit(request_id=id, prompt=[1, 2, 3, 4], limits=limits) for id in ids]
    reign = Reign(store, await store.lead(1))
    await reign.commit(*[Write(record(each.request_id), submit=each.SerializeToString()) for each in submits])
    return store


async def test_a_request_that_is_sent_again_before_it_was_read_holds_up_no_other() -> None:
    store = await left_unread("a")
    async with scheduler(store) as (leader, target):
        leader.workers.led_since -= MODEL_STAYS_S
        worker, gateway = await ScriptedWorker(target).attach(), ScriptedGateway(target)
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("a", 1, 2, 3, 4, max_tokens=9)
        await gateway.submit("new")
        await gateway.until(lambda: "new" in gateway.accepted)
        assert "a" not in gateway.accepted
        store.reads.set()
        await gateway.until(lambda: "a" in gateway.accepted)
        for peer in (worker, gateway):
            await peer.close()


async def test_requests_that_were_unread_count_no_longer_once_they_are_read() -> None:
    store = await left_unread("a", "b", "c")
    async with scheduler(store) as (leader, target):
        leader.workers.led_since -= MODEL_STAYS_S  # or the first worker would wait until their model is read
        worker, gateway = await ScriptedWorker(target).attach(), ScriptedGateway(target)
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("new")
        await gateway.until(lambda: "new" in gateway.accepted)
        assert leader.core.fleet.unseen.requests == 3
        store.reads.set()

        async def none_unseen() -> bool:
            return leader.core.fleet.unseen == Unseen()

        await until(none_unseen)
        assert not leader.recovery.unread
        for peer in (worker, gateway):
            await peer.close()
