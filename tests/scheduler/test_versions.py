"""Two sides of a link agree on the newest version that both speak, or both hear which of them is to be upgraded."""

from typing import Any

import grpc
import pytest

from protos import version
from protos.errors import Incompatible
from protos.former import FormerLinks
from protos.link.v1 import gateway_link_pb2_grpc, worker_link_pb2_grpc
from protos.serving import LINK_MESSAGE_BYTES, Server, channel
from scheduler_service.store import MemoryStore
from tests.scheduler.live import WAIT_S, ScriptedGateway, ScriptedWorker, scheduler
from worker_service.announcing import refusal


@pytest.fixture(autouse=True)
def speaks_two_and_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "LEAST", 2)
    monkeypatch.setattr(version, "CURRENT", 3)


@pytest.mark.parametrize(("least", "current", "agreed"), [(1, 2, 2), (2, 3, 3), (1, 9, 3), (3, 9, 3)])
def test_the_newest_that_both_speak(least: int, current: int, agreed: int) -> None:
    assert version.agree(least, current, "worker") == agreed


@pytest.mark.parametrize(
    ("least", "current", "complaint"),
    [
        (1, 1, "the worker speaks version 1, the scheduler versions 2 to 3: upgrade the worker"),
        (4, 6, "the worker speaks versions 4 to 6, the scheduler versions 2 to 3: upgrade the scheduler"),
    ],
)
def test_who_has_nothing_in_common_hears_which_side_is_the_older(least: int, current: int, complaint: str) -> None:
    with pytest.raises(Incompatible, match=complaint):
        version.agree(least, current, "worker")


async def test_a_worker_hears_of_the_version_agreed_on_or_is_refused() -> None:
    async with scheduler(MemoryStore()) as (_, target):
        newer = await ScriptedWorker(target, "newer").attach(protocol=7, min_protocol=3)
        assert newer.welcome.protocol == 3
        older = ScriptedWorker(target, "older")
        with pytest.raises(grpc.aio.AioRpcError, match=r"speaks version 1, .*: upgrade the worker"):
            await older.attach(protocol=1)
        await newer.close()
        await older.close()


@pytest.mark.parametrize(
    ("span", "complaint"),
    [
        (None, "the gateway speaks version 1, .*: upgrade the gateway"),  # from before there was a choice
        ("4-5", "the gateway speaks versions 4 to 5, .*: upgrade the scheduler"),
        ("three", "'three' is no span of versions"),
    ],
)
async def test_a_gateway_of_another_version_is_refused(span: str | None, complaint: str) -> None:
    async with scheduler(MemoryStore()) as (_, target):
        gateway = ScriptedGateway(target, ((version.KEY, span),) if span else ())
        with pytest.raises((grpc.aio.AioRpcError, AssertionError), match=complaint):
            await gateway.read()
        await gateway.close()


@pytest.mark.parametrize(("path", "peer"), [("WorkerLink/Attach", "worker"), ("GatewayLink/Link", "gateway")])
async def test_who_calls_as_version_1_did_is_told_to_upgrade(path: str, peer: str) -> None:
    server = Server((), LINK_MESSAGE_BYTES)
    server.grpc.add_generic_rpc_handlers((FormerLinks(),))
    target = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    async with channel(target) as link:
        call = link.stream_stream(f"/laps_sd.v1.{path}")(timeout=WAIT_S)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
    await server.stop(0)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert refused.value.details() == f"the {peer} speaks version 1, the scheduler versions 2 to 3: upgrade the {peer}"


@pytest.mark.parametrize(
    ("stub", "method", "peer"),
    [
        (gateway_link_pb2_grpc.GatewayLinkStub, "Link", "gateway"),
        (worker_link_pb2_grpc.WorkerLinkStub, "Attach", "worker"),
    ],
)
async def test_who_calls_a_scheduler_of_version_1_or_another_service_says_so(stub: Any, method: str, peer: str) -> None:
    server = Server((), LINK_MESSAGE_BYTES)  # knows no call of ours, as a scheduler of version 1
    target = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    async with channel(target) as link:
        call = getattr(stub(link), method)(timeout=WAIT_S)
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await call.read()
    await server.stop(0)
    expected = f"no scheduler of versions 2 to 3, which the {peer} speaks, is at that port: "
    expected += "upgrade it, or name another port"
    assert version.reason(unknown.value, peer) == expected
    if peer == "worker":
        assert str(refusal(unknown.value)) == expected  # of a worker that leaves if it is refused
