"""Workers that are coming and workers that are told to go, live."""

import grpc
import pytest

from protos import version
from protos.errors import QueueFull
from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import gateway_link_pb2 as gateway_pb
from protos.link.v1 import worker_link_pb2 as worker_pb
from protos.link.v1.gateway_link_pb2_grpc import GatewayLinkStub
from protos.link.v1.worker_link_pb2_grpc import WorkerLinkStub
from protos.serving import channel
from protos.v1 import inference_pb2 as inference_pb
from protos.v1 import status_pb2 as status_pb
from scheduler_service.outbox import GatewayOutbox
from tests.scheduler.live import MODEL, Live, ScriptedGateway, ScriptedWorker
from tests.waiting import until


def announcement(**changes: object) -> worker_pb.AnnounceRequest:
    about = {"protocol": version.CURRENT, "worker_id": "new", "model_name": MODEL.name, "model_fingerprint": "f"}
    return worker_pb.AnnounceRequest(**about | changes)  # type: ignore[arg-type]


async def stats(gateway: ScriptedGateway) -> status_pb.StatsResponse:
    return await gateway.unary.Stats(inference_pb.StatsRequest())


async def drain(gateway: ScriptedGateway, worker: str, *, force: bool = False) -> int:
    asked = inference_pb.DrainWorkerRequest(worker_id=worker, force=force)
    return (await gateway.unary.DrainWorker(asked)).remaining


async def test_a_worker_that_is_coming_is_known_while_it_loads(live: Live) -> None:
    _, worker, gateway = live
    async with channel(worker.target) as link:
        call = WorkerLinkStub(link).Announce(announcement())
        assert await call.read() == worker_pb.Announced()
        assert list((await stats(gateway)).loading_workers) == ["new"]
        call.cancel()

        async def forgotten() -> bool:
            return not (await stats(gateway)).loading_workers

        await until(forgotten)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_name": "other", "model_fingerprint": "g"}, "other differs from what the other workers run: scripted"),
        ({"model_fingerprint": "g"}, "this scripted has other files or --weights than what the other workers run"),
        ({"protocol": 9}, "the worker speaks version 9, the scheduler versions 2 to 3: upgrade the scheduler"),
    ],
)
async def test_a_worker_that_does_not_belong_here_hears_so_before_it_loads(
    live: Live, change: dict[str, object], complaint: str
) -> None:
    _, worker, _ = live
    async with channel(worker.target) as link:
        with pytest.raises(grpc.aio.AioRpcError, match=complaint):
            await WorkerLinkStub(link).Announce(announcement(**change)).read()


async def test_a_worker_that_is_to_go_is_told_and_its_successor_gets_what_comes(live: Live) -> None:
    _, worker, gateway = live
    other = await ScriptedWorker(worker.target, "other").attach()
    assert await drain(gateway, "w") == 1
    while not (await worker.read()).HasField("drain"):
        pass
    assert [one.worker_id for one in (await stats(gateway)).workers if one.draining] == ["w"]
    await gateway.submit("a")
    await other.until("a")
    await other.close()


async def test_the_last_worker_goes_only_by_force(live: Live) -> None:
    _, worker, gateway = live
    with pytest.raises(grpc.aio.AioRpcError, match="w is the last worker") as refused:
        await drain(gateway, "w")
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert await drain(gateway, "w", force=True) == 0
    while not (await worker.read()).HasField("drain"):
        pass


async def test_a_worker_that_goes_already_may_be_told_again(live: Live) -> None:
    *_, gateway = live
    await drain(gateway, "w", force=True)
    assert await drain(gateway, "w") == 0


async def test_a_worker_whose_link_breaks_before_it_hears_that_it_is_to_go_hears_it_when_it_is_back(live: Live) -> None:
    leader, worker, gateway = live

    async def alone() -> bool:
        return not leader.sessions

    await drain(gateway, "w", force=True)
    worker.call.cancel()
    await until(alone)
    again = await ScriptedWorker(worker.target, "w").attach()
    while not (await again.read()).HasField("drain"):
        pass
    await again.report(draining=True)
    await again.close()
    await until(alone)
    successor = await ScriptedWorker(worker.target, "w").attach()
    await gateway.submit("a")
    await successor.until("a")
    await successor.close()


async def test_a_worker_that_left_in_the_moment_when_it_was_to_go_has_a_successor_that_stays(live: Live) -> None:
    leader, worker, gateway = live

    async def alone() -> bool:
        return not leader.sessions

    await drain(gateway, "w", force=True)
    await worker.report(leaving=True)
    await worker.close()
    await until(alone)
    successor = await ScriptedWorker(worker.target, "w").attach()
    await gateway.submit("a")
    await successor.until("a")
    assert not leader.core.fleet.workers["w"].draining
    await successor.close()


async def test_a_worker_that_is_not_there_cannot_go(live: Live) -> None:
    *_, gateway = live
    with pytest.raises(grpc.aio.AioRpcError, match="worker 'x' is not attached; attached are w") as refused:
        await drain(gateway, "x")
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_what_waits_moves_to_a_worker_as_soon_as_it_comes(live: Live) -> None:
    _, worker, gateway = live
    for id in "ab":
        await gateway.submit(id)
    await worker.until("a", "b")
    await worker.report(worker.row("a", 0, 7))
    other = await ScriptedWorker(worker.target, "other").attach()
    await other.until("b")  # by its first commands, without a report of anybody
    await other.close()


async def test_a_gateway_that_chooses_between_cells_is_told_how_long_a_request_would_wait(live: Live) -> None:
    _, worker, _ = live
    async with channel(worker.target) as link:
        call = GatewayLinkStub(link).Link(metadata=(*version.METADATA, (version.LOAD_KEY, "1")))
        while not (told := await call.read()).serving.HasField("load"):
            pass
        assert (len(told.serving.load.backlog_s), told.serving.load.free_slots, told.serving.ready) == (3, 1, True)
        submit = gateway_pb.Submit(request_id="a", prompt=[1], limits=common_pb.Limits(max_tokens=9))
        await call.write(gateway_pb.FromGateway(submit=submit))
        while not (told := await call.read()).serving.load.request_s:
            pass
        assert told.serving.load.free_slots == 0
        assert told.serving.load.backlog_s[1] > 0
        call.cancel()


async def test_a_load_that_is_as_before_is_told_again_after_a_request_that_came_and_ended() -> None:
    outbox, load = GatewayOutbox(wants_load=True), gateway_pb.Load(free_slots=4)
    for _ in range(2):
        outbox.load(load)
    assert outbox.take().serving.load == load
    outbox.load(load)
    outbox.accepted("a")
    assert not outbox.take().HasField("serving")
    for _ in range(2):  # the gateway has added "a" to what it was told
        outbox.load(load)
        assert outbox.take().serving.load == load
        outbox.refuse("b", QueueFull("full"))
        assert not outbox.take().HasField("serving")
