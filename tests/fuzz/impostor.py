"""The other direction: a scheduler that talks nonsense to a real worker and a real gateway, and sense in between."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from laps_sd.client import AsyncClient
from protos.errors import RequestError
from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import gateway_link_pb2 as gateway_pb
from protos.link.v1 import worker_link_pb2 as worker_pb
from protos.serving import LINK_MESSAGE_BYTES, options
from protos.v1 import types_pb2 as types_pb
from tests.fuzz.fuzzing import Harm
from tests.fuzz.inputs import mutated
from tests.waiting import WAIT_S

PER_STREAM = 64  # inputs, then it hangs up
IDS = ("one", "two", "three")
PROMPT = (5, 6, 7, 8)
_GONE = (grpc.aio.BaseError, grpc.aio.UsageError, StopAsyncIteration)
Outcome = TypeVar("Outcome")


class Impostor:
    """Both links of a scheduler. A link that is made waits in `links` until somebody talks on it."""

    def __init__(self) -> None:
        self.links: dict[str, asyncio.Queue[Link]] = {"Link": asyncio.Queue(), "Attach": asyncio.Queue()}
        self._server = grpc.aio.server(options=options(LINK_MESSAGE_BYTES))
        for service, method in (("GatewayLink", "Link"), ("WorkerLink", "Attach")):
            handler = grpc.stream_stream_rpc_method_handler(self._serve(method))
            handlers = grpc.method_handlers_generic_handler(f"laps_sd.link.v1.{service}", {method: handler})
            self._server.add_generic_rpc_handlers((handlers,))

    def _serve(self, method: str) -> Callable[..., Any]:
        async def serve(requests: Any, context: Any) -> None:
            link = Link(requests, context)
            self.links[method].put_nowait(link)
            await link.over.wait()

        return serve

    async def start(self) -> str:
        """Its HOST:PORT."""
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    async def stop(self) -> None:
        await self._server.stop(0)

    async def converse(self, method: str, talk: "Callable[[Link], Awaitable[Outcome]]") -> "Outcome":
        """What `talk` returns over the next link that lasts. Raises Harm if none does."""
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    link = await self.links[method].get()
                    try:
                        return await talk(link)
                    except _GONE:  # its maker has given up meanwhile
                        continue
                    finally:
                        link.over.set()
        except TimeoutError:
            raise Harm(f"no {method} lasts any more") from None


class Link:
    """Raw bytes both ways, until `over`."""

    def __init__(self, requests: Any, context: Any) -> None:
        self.over = asyncio.Event()
        self._requests, self._context = requests, context

    async def read(self, kind: type[Message]) -> Any:
        return kind.FromString(await anext(self._requests))

    async def say(self, message: Message) -> None:
        await self._context.write(message.SerializeToString())

    async def babble(
        self, seeds: Sequence[Message], random: Random, spared: Callable[[bytes], bool] = lambda raw: False
    ) -> int:
        """How many inputs were heard before it was hung up on, by either side. Those that are `spared` are not said."""
        said = 0
        listening = asyncio.create_task(self._listen())
        try:
            while said < PER_STREAM and not listening.done():
                raw = mutated(random, random.choice(seeds))
                if spared(raw):
                    continue
                await self._context.write(raw)
                said += 1
        except _GONE:
            pass
        finally:
            listening.cancel()
            await asyncio.wait([listening])
        return said

    async def _listen(self) -> None:
        async for _ in self._requests:
            pass


def _drains(raw: bytes) -> bool:
    """As a worker would read it."""
    try:
        return worker_pb.ToWorker.FromString(raw).HasField("drain")
    except DecodeError:
        return False


def _admit(id: str, placement: int, max_tokens: int) -> worker_pb.Admit:
    return worker_pb.Admit(
        request_id=id,
        placement=placement,
        tokens=PROMPT,
        prompt_len=len(PROMPT),
        sampling=common_pb.Sampling(temperature=0.5 if placement > 1 else 0, top_p=1, seed=3),
        limits=common_pb.Limits(max_tokens=max_tokens, ignore_eos=True),
    )


async def to_worker(link: Link, random: Random) -> int:
    """One link of nonsense: commands with something wrong, some to requests that run."""
    hello = (await link.read(worker_pb.FromWorker)).hello
    welcome = worker_pb.ToWorker(welcome=worker_pb.Welcome(epoch=hello.max_epoch, max_lag=100))
    await link.say(welcome)
    command = worker_pb.StepCommand(
        epoch=hello.max_epoch,
        session=hello.session,
        seq=1,
        admit=[_admit(id, random.randint(1, 3), 20) for id in IDS],
        schedule=[worker_pb.Run(request_id=id, draft_len=2, prefill_tokens=8) for id in IDS],
    )
    edits = {edit: [random.choice(IDS)] for edit in random.sample(("drop", "forget", "offload"), 2)}
    edited = worker_pb.StepCommand(epoch=command.epoch, session=hello.session, schedule=command.schedule, **edits)
    seeds = [worker_pb.ToWorker(command=command), worker_pb.ToWorker(command=edited), welcome]
    return await link.babble(seeds, random, _drains)  # a worker that is told to drain obeys, and is gone


async def worker_is_well(link: Link) -> tuple[int, ...]:
    """What it answers to a request of sense, after all that."""
    hello = (await link.read(worker_pb.FromWorker)).hello
    await link.say(worker_pb.ToWorker(welcome=worker_pb.Welcome(epoch=hello.max_epoch, max_lag=10**6)))
    command = worker_pb.StepCommand(
        epoch=hello.max_epoch,
        session=hello.session,
        seq=1,
        forget=sorted({held.request_id for held in hello.held} | {*IDS, "canary"}),
        admit=[_admit("canary", 1, 12)],
        schedule=[worker_pb.Run(request_id="canary", draft_len=2, prefill_tokens=64)],
    )
    await link.say(worker_pb.ToWorker(command=command))
    tokens: list[int] = []
    while True:
        report = (await link.read(worker_pb.FromWorker)).report
        for row in report.rows:
            tokens += row.tokens
            if row.finish:
                return (row.finish, *tokens)


async def to_gateway(link: Link, random: Random, serving: gateway_pb.Serving) -> int:
    """One link of nonsense, about requests that the gateway's clients have and others."""
    await link.say(gateway_pb.ToGateway(serving=serving))
    ending = gateway_pb.Ending(finish_reason=types_pb.FINISH_REASON_LENGTH, rounds=1)
    id = random.choice(IDS)
    bare = gateway_pb.Serving(ready=True)
    bare.model.CopyFrom(serving.model)
    bare.model.ClearField("tokenizer_json")  # megabytes of it would drown all else
    seeds = [
        gateway_pb.ToGateway(accepted=[id]),
        gateway_pb.ToGateway(deltas=[gateway_pb.Delta(request_id=id, tokens=[9, 10], drafted=1, accepted=1)]),
        gateway_pb.ToGateway(deltas=[gateway_pb.Delta(request_id=id, start=2, tokens=[11], ending=ending)]),
        gateway_pb.ToGateway(refusals=[gateway_pb.Refusal(request_id=id, code=8, message="full", retry_after_s=0.005)]),
        gateway_pb.ToGateway(serving=bare),
    ]
    return await link.babble(seeds, random)


async def gateway_is_well(link: Link, target: str, serving: gateway_pb.Serving) -> tuple[int, ...]:
    """What a client gets of tokens that a scheduler of sense sends."""
    await link.say(gateway_pb.ToGateway(serving=serving))
    async with AsyncClient(target, max_retries=0) as client:
        await client.ready(WAIT_S)
        answer = asyncio.create_task(client.complete("The quick", max_tokens=3, request_id="canary", timeout_s=WAIT_S))
        while (message := await link.read(gateway_pb.FromGateway)).submit.request_id != "canary":
            pass  # what is left of the others
        ending = gateway_pb.Ending(finish_reason=types_pb.FINISH_REASON_LENGTH, rounds=1)
        delta = gateway_pb.Delta(request_id=message.submit.request_id, tokens=[9, 10, 11], ending=ending)
        await link.say(gateway_pb.ToGateway(accepted=["canary"], deltas=[delta]))
        return tuple((await answer).token_ids)


async def asking(target: str) -> None:
    """Clients whose requests the nonsense is about; whatever they are told, they ask again."""

    async def ask(id: str) -> None:
        async with AsyncClient(target, max_retries=0) as client:
            while True:
                with suppress(RequestError):
                    await client.complete("The quick", max_tokens=5, request_id=id, timeout_s=1.0)
                await asyncio.sleep(0.01)

    await asyncio.gather(*(ask(id) for id in IDS))


async def batch(impostor: Impostor, seed: str, inputs: int, gateway: str, serving: gateway_pb.Serving) -> Counter[str]:
    """So many inputs to each of the two; then both must do what they do for a scheduler of sense. Raises Harm."""
    seen = Counter[str]()
    clients = asyncio.create_task(asking(gateway))

    async def keep(method: str, nonsense: Callable[..., Awaitable[int]]) -> None:
        number = 0
        while seen[method] < inputs:
            talk = partial(nonsense, random=Random(f"{seed}/{method}/{number}"))
            seen[method] += await impostor.converse(method, talk)
            number += 1

    try:
        await asyncio.gather(keep("Attach", to_worker), keep("Link", partial(to_gateway, serving=serving)))
    finally:
        clients.cancel()
        await asyncio.wait([clients])
    tokens = await impostor.converse("Link", lambda link: gateway_is_well(link, gateway, serving))
    if tokens != (9, 10, 11):
        raise Harm(f"batch {seed}: the gateway makes {tokens} of 9, 10, 11")
    return seen
