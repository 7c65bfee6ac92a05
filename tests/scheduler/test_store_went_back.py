"""The store came back from an old copy: requests that have ended are live there again, and are read once more."""

import asyncio

from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import gateway_link_pb2 as gateway_pb
from scheduler_service.outbox import GatewayOutbox
from scheduler_service.recovery import Recovery
from scheduler_service.store import Index, MemoryStore, Stored
from scheduler_service.unreadable import Found
from tests.scheduler.builders import request
from tests.scheduler.live import hello, scheduler
from tests.scheduler.store.writes import record
from tests.waiting import WAIT_S, until


async def test_a_request_that_a_store_made_live_again_goes_on_though_it_was_sent_again_meanwhile() -> None:
    """When the index was read after the store had gone back, the request was known here, and not stored."""
    memory, outbox = MemoryStore(), GatewayOutbox()
    async with scheduler(memory, predictor="none") as (leader, _):
        await leader.attach(hello())
        memory._requests = {"a": waiting("a")}
        await leader.requests.submit(submission("a"), outbox)

        async def goes_on() -> bool:
            return "a" in leader.ledger.live and leader.ledger.live["a"].stored

        await until(goes_on)
        assert outbox.take().refusals[0].retry_after_s > 0


def submission(id: str) -> gateway_pb.Submit:
    return gateway_pb.Submit(request_id=id, prompt=[1] * 4, limits=common_pb.Limits(max_tokens=9))


def waiting(id: str) -> Stored:
    """A live request without KV."""
    return Stored(record(id, request=request(id)), submission(id).SerializeToString(), b"", None)


async def test_a_store_that_goes_back_while_its_index_is_asked_for_is_asked_again() -> None:
    taken = asyncio.Event()

    class Falling(MemoryStore):
        async def index(self) -> Index:
            index = await super().index()
            if not self._requests:
                self._requests = {"a": waiting("a")}
                recovery.again()
            return index

    async def take(id: str, found: Found) -> None:
        taken.set()

    recovery = Recovery(Falling(), take, known=lambda id: False)
    recovery.again()
    running = asyncio.create_task(recovery.run())
    async with asyncio.timeout(WAIT_S):
        await taken.wait()
    running.cancel()
