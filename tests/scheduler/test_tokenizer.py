"""Workers leave their tokenizer out of their greeting, and the scheduler asks one of them for it."""

import asyncio

import grpc
import pytest

from protos.errors import BadInput
from protos.link.v1 import worker_link_pb2 as pb
from protos.models import PART_BYTES
from scheduler_service.links import workers as links
from scheduler_service.store import MemoryStore
from tests.scheduler.live import MODEL, ScriptedGateway, ScriptedWorker, hello, scheduler

TOKENIZER = bytes(range(256)) * 4


class Worker(ScriptedWorker):
    """Leaves its tokenizer out."""

    async def greet(self, size: int = len(TOKENIZER)) -> pb.ToWorker:
        """The scheduler's answer."""
        said = hello(self.name, session=self.session, tokenizer_bytes=size)
        await self.call.write(pb.FromWorker(hello=said))
        answer: pb.ToWorker = await self.read()
        return answer

    async def describe(self, *parts: bytes) -> pb.ToWorker:
        """The answer to these parts of the tokenizer."""
        for part in parts:
            await self.call.write(pb.FromWorker(tokenizer_part=part))
        answer: pb.ToWorker = await self.read()
        return answer


async def test_the_first_is_asked_and_gateways_get_all_of_it() -> None:
    async with scheduler(MemoryStore()) as (_, target):
        gateway, worker = ScriptedGateway(target), Worker(target)
        assert (await worker.greet()).HasField("describe")
        assert (await worker.describe(TOKENIZER[:1000], TOKENIZER[1000:])).HasField("welcome")
        await gateway.until(lambda: gateway.serving.ready)
        assert gateway.serving.model.tokenizer_json == TOKENIZER
        await gateway.close()
        await worker.close()


async def test_of_many_that_come_at_once_one_is_asked() -> None:
    async with scheduler(MemoryStore()) as (leader, target):
        workers = [Worker(target, f"w{number}") for number in range(6)]

        async def attached(worker: Worker) -> bool:
            if asked := (await worker.greet()).HasField("describe"):
                assert (await worker.describe(TOKENIZER)).HasField("welcome")
            return asked

        assert sum(await asyncio.gather(*map(attached, workers))) == 1
        assert len(leader.sessions) == 6
        await asyncio.gather(*(worker.close() for worker in workers))


async def test_a_worker_that_comes_back_to_an_empty_service_is_not_asked_again() -> None:
    async with scheduler(MemoryStore()) as (leader, target):
        first, again = Worker(target), Worker(target)
        await first.greet()
        await first.describe(TOKENIZER)
        leader.workers.detach(leader.sessions["w"])
        assert (await again.greet()).HasField("welcome")
        assert leader.workers.served is not None
        assert leader.workers.served.tokenizer_json == TOKENIZER
        await first.close()
        await again.close()


async def test_an_older_worker_greets_with_all_of_it() -> None:
    async with scheduler(MemoryStore()) as (leader, target):
        older = ScriptedWorker(target)
        model = type(MODEL)(tokenizer_json=TOKENIZER)
        await older.attach(protocol=2, model=model)
        newer = Worker(target, "newer")
        assert (await newer.greet()).HasField("welcome")
        assert leader.workers.served is not None
        assert leader.workers.served.tokenizer_json == TOKENIZER
        await older.close()
        await newer.close()


@pytest.mark.parametrize("parts", [[TOKENIZER, b"more"], [b""], [TOKENIZER[:9]]], ids=["long", "empty", "short"])
async def test_who_does_not_send_what_it_promised_is_refused_and_the_next_is_asked(
    parts: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scheduler(MemoryStore()) as (_, target):
        worker = Worker(target)
        with monkeypatch.context() as patch:
            patch.setattr(links, "PART_TIMEOUT_S", 0.1)
            await worker.greet(len(TOKENIZER) + 1)
            with pytest.raises(grpc.aio.AioRpcError, match="tokenizer_part") as refused:
                await worker.describe(*parts)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        other = Worker(target, "other")
        assert (await other.greet()).HasField("describe")
        await worker.close()
        await other.close()


async def test_a_tokenizer_that_would_fit_into_no_message_is_not_asked_for() -> None:
    async with scheduler(MemoryStore()) as (_, target):
        worker = Worker(target)
        with pytest.raises(grpc.aio.AioRpcError, match="tokenizer_bytes: must be at most"):
            await worker.greet(1 << 30)
        await worker.close()


async def test_a_worker_of_another_model_is_not_asked_and_keeps_nobody_waiting() -> None:
    async with scheduler(MemoryStore()) as (_, target):
        worker, other = Worker(target), Worker(target, "other")
        await worker.greet()
        await worker.describe(TOKENIZER)
        said = hello("other", model=type(MODEL)(fingerprint="other"), tokenizer_bytes=9)
        await other.call.write(pb.FromWorker(hello=said))
        with pytest.raises(grpc.aio.AioRpcError, match="what the other workers run"):
            await other.read()
        await worker.close()
        await other.close()


class Dripping:
    """A stream on which a tokenizer comes byte by byte."""

    async def write(self, message: pb.ToWorker) -> None:
        assert message.HasField("describe")

    async def read(self) -> pb.FromWorker:
        await asyncio.sleep(0)
        return pb.FromWorker(tokenizer_part=b"x")


async def test_one_that_comes_byte_by_byte_does_not_keep_others_waiting_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "PART_TIMEOUT_S", 0.01)
    with pytest.raises(BadInput, match="too slow"):
        await links._tokenizer(PART_BYTES, Dripping())
