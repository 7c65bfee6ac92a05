"""What a scheduler that starts anew reads back from Redis, and in which order."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import gateway_link_pb2 as pb
from protos.link.v1 import worker_link_pb2 as worker_pb
from protos.v1 import types_pb2 as types_pb
from protos.v1.types_pb2 import Structure
from scheduler_service.config import Settings
from scheduler_service.leader import Leader
from scheduler_service.ledger import AT_ONCE
from scheduler_service.outbox import GatewayOutbox
from scheduler_service.store import MemoryStore, RedisStore, Stored, StoreUnavailable, Write
from scheduler_service.store.rounds import encode
from tests.scheduler.builders import request
from tests.scheduler.live import ScriptedGateway, ScriptedWorker, scheduler
from tests.scheduler.store.writes import record
from tests.waiting import WAIT_S, until

STOP = types_pb.FINISH_REASON_STOP


async def test_a_restarted_scheduler_reads_redis_back_and_goes_on(redis_url: str, namespace: str) -> None:
    store = RedisStore(redis_url, namespace=namespace, timeout_s=WAIT_S)
    async with scheduler(store) as (_, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("a", sampling=common_pb.Sampling(structure=Structure(regex="a+")))
        await worker.until("a")
        await worker.report(worker.row("a", 0, 7, 8))
        await gateway.until(lambda: gateway.tokens.get("a") == [7, 8])
        await worker.report(worker.row("a", 2, 9, 9, 9))
        await gateway.close()
        await worker.close()
    first_epoch = worker.welcome.epoch
    stored = await store.get("a")
    assert stored is not None
    async with scheduler(store) as (_, target):
        worker = await ScriptedWorker(target).attach(worker_pb.Held(request_id="a", placement=1, output_tokens=5))
        assert worker.welcome.epoch > first_epoch
        gateway = ScriptedGateway(target)
        gateway.tokens["a"] = [7, 8]
        await gateway.follow("a", 2)
        await worker.until("a")
        assert list(worker.command.admit[0].tokens)[:5] == [1, 2, 3, 7, 8]
        assert worker.command.admit[0].placement == 1
        assert worker.command.admit[0].sampling.structure.regex == "a+"
        await worker.report(worker.row("a", stored.record.emitted, 4, finish=STOP))
        await gateway.until(lambda: "a" in gateway.endings)
        assert gateway.tokens["a"][-1] == 4
        await gateway.close()
        await worker.close()
    await store.close()


async def test_a_finished_request_can_be_followed_after_a_restart(redis_url: str, namespace: str) -> None:
    store = RedisStore(redis_url, namespace=namespace, timeout_s=WAIT_S)
    async with scheduler(store) as (_, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("a")
        await worker.until("a")
        await worker.report(worker.row("a", 0, 7, 8, finish=STOP))
        await gateway.until(lambda: "a" in gateway.endings)
        await gateway.close()
        await worker.close()
    async with scheduler(store) as (_, target):
        gateway = ScriptedGateway(target)
        await gateway.follow("a")
        await gateway.until(lambda: "a" in gateway.endings)
        assert gateway.tokens["a"] == [7, 8]
        await gateway.close()
    await store.close()


async def test_waiting_requests_are_read_while_the_new_leader_serves(redis_url: str, namespace: str) -> None:
    """Who follows one that is still to be read is answered in its turn, and holds up nobody."""

    class Gated(RedisStore):
        opened = asyncio.Event()

        async def read(self, ids: Sequence[str]) -> list[Stored | None]:
            if "waits" in ids:
                await self.opened.wait()
            return await super().read(ids)

    store = Gated(redis_url, namespace=namespace)
    async with scheduler(store, policy="fcfs") as (_, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        for id in ("runs", "waits"):
            await gateway.submit(id)
        await worker.until("runs", "waits")
        await worker.report(worker.row("runs", 0, 7))
        await gateway.until(lambda: gateway.tokens.get("runs") == [7])
    await gateway.close()
    await worker.close()
    async with scheduler(store, policy="fcfs") as (leader, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        for id in ("waits", "runs", "nobody"):
            await gateway.follow(id)
        await gateway.until(lambda: gateway.tokens.get("runs") == [7] and "nobody" in gateway.refused)
        assert "waits" not in leader.ledger.live
        store.opened.set()
        await worker.until("runs", "waits")
        assert not leader.recovery.unread
        assert leader.ledger.live["waits"].followers
        await gateway.close()
        await worker.close()
    await store.close()


async def test_a_take_over_that_redis_breaks_off_is_repeated_whole(redis_url: str, namespace: str) -> None:
    class BreaksOff(RedisStore):
        broken = False

        async def read(self, ids: Sequence[str]) -> list[Stored | None]:
            if ids and not self.broken:
                self.broken = True
                raise StoreUnavailable("broken off")
            return await super().read(ids)

    store = BreaksOff(redis_url, namespace=namespace)
    async with scheduler(store) as (_, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("a")
        await worker.until("a")
        await worker.report(worker.row("a", 0, 7))
        await gateway.until(lambda: gateway.tokens.get("a") == [7])
        await gateway.close()
        await worker.close()
    leader = Leader(Settings(_cli_parse_args=False), store)  # type: ignore[call-arg]
    with pytest.raises(StoreUnavailable):
        await leader.lead()
    assert not leader.core.fleet.entries
    await leader.lead()
    assert list(leader.core.fleet.entries) == ["a"]
    await store.close()


async def test_a_new_leader_knows_of_rounds_that_were_stored_as_tokens_alone(redis_url: str, namespace: str) -> None:
    store = RedisStore(redis_url, namespace=namespace, timeout_s=WAIT_S)
    async with scheduler(store) as (leader, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("a")
        await worker.until("a")
        for start in range(0, 9, 3):
            await worker.report(worker.row("a", start, 7, 8, 9, drafted=4, accepted=2))
        await gateway.until(lambda: len(gateway.tokens.get("a", ())) == 9)
        known = leader.core.fleet.entries["a"].record()
        await gateway.close()
        await worker.close()
    (counted,) = await store._redis.hmget(store.keys.request("a"), "counted")
    assert counted == b"3"  # the first round made it run
    async with scheduler(store) as (leader, _):
        assert leader.core.fleet.entries["a"].acceptance == known.acceptance
        assert known.acceptance.rounds == 3
    await store.close()


async def test_who_followed_early_is_answered_though_the_one_who_had_the_request_read_hangs_up() -> None:
    store, rounds = MemoryStore(), 3 * AT_ONCE
    made = record("a", request=request("a", prompt=1))
    submit = pb.Submit(request_id="a", prompt=[1]).SerializeToString()
    log = b"".join(encode([number], 0, 0) for number in range(rounds))
    output = Write(replace(made, emitted=rounds), start=0, log=log)
    await store.commit(await store.lead(1), 1, [Write(made, submit=submit), output])
    leader, outbox = Leader(Settings(_cli_parse_args=False), store), GatewayOutbox()  # type: ignore[call-arg]
    await leader.lead()
    await leader.requests.follow(pb.Follow(request_id="a"), outbox)
    asked = asyncio.create_task(leader.requests.submission("a"))
    await asyncio.sleep(0)
    assert "a" in leader.ledger.live
    asked.cancel()

    async def joined() -> bool:
        return bool(outbox.follows)

    await until(joined)
    assert len(outbox.take().deltas) == rounds
    leader.persisting.cancel()
