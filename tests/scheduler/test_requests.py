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

NOT_FOUND = 5


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
    """Answers no question after a request that begins with one of these letters."""

    def __init__(self, letters: str) -> None:
        super().__init__()
        self.letters, self.asked = letters, list[str]()

    async def get(self, id: str) -> Stored | Unreadable | None:
        self.asked.append(id)
        if id.startswith(tuple(self.letters)):
            raise StoreUnavailable("away")
        return await super().get(id)


async def test_a_follow_of_what_is_forgotten_while_it_waits_for_its_turn_cuts_no_link() -> None:
    """When it came the request had ended just now, so that the store was not to be asked."""
    turns = Held()
    async with scheduler(Away("a")) as (leader, target):
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


async def follow_at_once(gateway: ScriptedGateway, ids: str) -> None:
    """And hear that each is refused."""
    gateway.refused.clear()
    follows = pb.Follows(follow=[pb.Follow(request_id=id) for id in ids])
    await gateway.call.write(pb.FromGateway(follows=follows))
    await gateway.until(lambda: gateway.refused.keys() == set(ids))


async def test_however_many_follow_a_store_that_is_away_is_asked_for_two_of_them() -> None:
    """Each costs seconds, and the last would hear after hours that it is to come again."""
    async with scheduler(store := Away("abcde")) as (_, target):
        gateway = ScriptedGateway(target)
        await follow_at_once(gateway, "abcde")
        assert store.asked == ["a", "b"]
        assert all(refusal.retry_after_s > 0 for refusal in gateway.refused.values())
        store.letters = "-"
        await follow_at_once(gateway, "ab")  # it is asked anew
        assert [refusal.code for refusal in gateway.refused.values()] == [NOT_FOUND, NOT_FOUND]
        await gateway.close()


async def test_a_follow_that_alone_cannot_be_looked_up_has_no_other_refused() -> None:
    async with scheduler(store := Away("b")) as (_, target):
        gateway = ScriptedGateway(target)
        await follow_at_once(gateway, "xbyz")
        assert store.asked == list("xbyz")
        assert {id for id, refusal in gateway.refused.items() if refusal.code == NOT_FOUND} == set("xyz")
        await gateway.close()


async def test_what_was_read_while_it_waited_for_a_store_that_is_away_is_answered() -> None:
    async with scheduler(store := Away("abc")) as (leader, target):
        gateway = ScriptedGateway(target)
        told, known = leader.requests.needs_store, Tracked(pb.Submit(request_id="d"), record("d"), stored=True)
        known.ending = pb.Ending().SerializeToString()

        def needs_store(asked: pb.Submit | pb.Follow) -> bool:
            needed = told(asked)
            if store.asked == ["a", "b"]:
                leader.ledger._ended["d"] = known
            return needed

        leader.requests.needs_store = needs_store  # type: ignore[method-assign]
        follows = pb.Follows(follow=[pb.Follow(request_id=id) for id in "abcd"])
        await gateway.call.write(pb.FromGateway(follows=follows))
        await gateway.until(lambda: "d" in gateway.endings)
        assert store.asked == ["a", "b"]
        assert gateway.refused.keys() == set("abc")
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
