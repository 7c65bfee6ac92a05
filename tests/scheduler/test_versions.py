"""Two sides of a link agree on the newest version that both speak, or hear which of them is to be upgraded."""

import grpc
import pytest

from protos import version
from protos.errors import BadInput
from protos.v1 import gateway_link_pb2_grpc
from scheduler_service.store import MemoryStore
from tests.scheduler.live import ScriptedGateway, ScriptedWorker, scheduler


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
    with pytest.raises(BadInput, match=complaint):
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
        gateway = ScriptedGateway(target)
        metadata = ((version.KEY, span),) if span else ()
        gateway.call = gateway_link_pb2_grpc.GatewayLinkStub(gateway._channel).Link(metadata=metadata)
        with pytest.raises((grpc.aio.AioRpcError, AssertionError), match=complaint):
            await gateway.read()
        await gateway.close()
