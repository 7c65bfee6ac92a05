"""A pair of scheduler processes: one leads, the other stands by. Who is killed or stopped harms nothing."""

import signal

import grpc
import pytest

from protos.link.v1 import worker_link_pb2 as worker_pb
from protos.v1 import types_pb2
from tests.scheduler.live import ScriptedGateway, ScriptedWorker
from tests.scheduler.pair import SchedulerProcess, pair
from tests.waiting import until

STOP = types_pb2.FINISH_REASON_STOP


async def peers(scheduler: SchedulerProcess, *held: worker_pb.Held) -> tuple[ScriptedGateway, ScriptedWorker]:
    gateway = ScriptedGateway(scheduler.target)
    worker = await ScriptedWorker(scheduler.target).attach(*held)
    await gateway.until(lambda: gateway.serving.ready)
    return gateway, worker


async def test_a_standby_sends_away_who_comes(redis_url: str, namespace: str) -> None:
    async with pair(redis_url, namespace, lease_s=3600) as (_, second):
        assert not await second.leads()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ScriptedWorker(second.target).attach()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_killed_leaders_requests_go_on_where_they_were_with_the_kv_they_had(
    redis_url: str, namespace: str
) -> None:
    async with pair(redis_url, namespace) as (first, second):
        gateway, worker = await peers(first)
        for id in ("runs", "waits"):
            await gateway.submit(id)
        await gateway.until(lambda: {"runs", "waits"} <= gateway.accepted)
        await worker.until("runs", "waits")
        await worker.report(worker.row("runs", 0, 7, 8))
        await gateway.until(lambda: gateway.tokens.get("runs") == [7, 8])
        epoch = worker.welcome.epoch
        await first.kill()
        await until(second.leads)
        held = worker_pb.Held(request_id="runs", placement=1, output_tokens=3, blocks=1)
        gateway, worker = await peers(second, held)
        assert worker.welcome.epoch > epoch
        gateway.tokens["runs"] = [7, 8]
        await gateway.follow("runs", 2)
        await gateway.follow("waits")
        await worker.until("runs", "waits")
        assert (worker.admitted["runs"].placement, list(worker.admitted["runs"].tokens)) == (1, [1, 2, 3, 7, 8])
        await worker.report(worker.row("runs", 2, 9, finish=STOP), worker.row("waits", 0, 5, finish=STOP))
        await gateway.until(lambda: len(gateway.endings) == 2)
        assert gateway.tokens == {"runs": [7, 8, 9], "waits": [5]}


async def test_a_leader_that_was_stopped_and_goes_on_writes_nothing_and_stands_by(
    redis_url: str, namespace: str
) -> None:
    async with pair(redis_url, namespace) as (first, second):
        old_gateway, old_worker = await peers(first)
        await old_gateway.submit("a")
        await old_gateway.until(lambda: "a" in old_gateway.accepted)
        await old_worker.until("a")
        first.signal(signal.SIGSTOP)
        await old_worker.report(old_worker.row("a", 0, 66, 66))  # it will read them when it goes on
        await old_gateway.cancel("a")
        await until(second.leads)
        gateway, worker = await peers(second)
        await gateway.follow("a")
        await worker.until("a")
        await worker.report(worker.row("a", 0, 7))
        await gateway.until(lambda: gateway.tokens.get("a") == [7])
        first.signal(signal.SIGCONT)

        async def stepped_down() -> bool:
            return not await first.leads() and await second.leads()

        await until(stepped_down)
        await worker.report(worker.row("a", 1, 8, finish=STOP))
        await gateway.until(lambda: "a" in gateway.endings)
        assert gateway.tokens["a"] == [7, 8]
        await old_gateway.ended()
        assert "a" not in old_gateway.tokens
        await second.kill()
        await until(first.leads)  # it stood by


async def test_an_orderly_end_hands_over_without_a_wait(redis_url: str, namespace: str) -> None:
    async with pair(redis_url, namespace, lease_s=3600) as (first, second):
        first.signal(signal.SIGTERM)
        await until(second.leads)
