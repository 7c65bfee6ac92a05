"""A scheduler without workers or Redis, over real gRPC: it accepts every request, sends its first round at once and the
others at a steady pace, for several requests in one message, as a real one does after a worker's step. A program:
`python -m laps_sd.gatewaybench.stub`. Nothing is measured here."""

import argparse
import asyncio
import gzip
from collections.abc import AsyncIterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import grpc
from tokenizers import Tokenizer

from protos.link.v1 import common_pb2, gateway_link_pb2_grpc
from protos.link.v1 import gateway_link_pb2 as pb
from protos.serving import BEAT_S, LINK_MESSAGE_BYTES, options
from protos.v1 import types_pb2

CONTEXT_TOKENS = 8192
REMEMBERED = 10_000
STEP = 32  # requests whose rounds go in one message: the slots of a worker
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@dataclass(slots=True)
class Live:
    submit: pb.Submit
    sent: int = 0
    until: float = inf  # a gateway whose buffer is full takes no more before it follows again


class Stub(gateway_link_pb2_grpc.GatewayLinkServicer):
    """It tells nobody of a request, and has no figures. `hold`: no request gets a second round before so many of a
    link have been live."""

    def __init__(
        self, model: common_pb2.ModelInfo, words: list[int], rounds_per_s: float, tokens_per_round: int, hold: int
    ) -> None:
        self.model, self.words = model, words
        self.every_s, self.tokens = 1 / rounds_per_s, tokens_per_round
        self.hold = hold
        self.submits: dict[str, pb.Submit] = {}  # of the newest requests, ended ones too: a gateway may follow them

    async def Link(self, requests: AsyncIterator[pb.FromGateway], context: Any) -> None:  # type: ignore[override] # noqa: N802
        link = Link(self, context)
        await link.send(pb.ToGateway(serving=pb.Serving(ready=True, model=self.model)))
        async with asyncio.TaskGroup() as tasks:
            beating = [tasks.create_task(link.beat()), tasks.create_task(link.step())]
            async for message in requests:
                await link.take(message)
            for task in beating:
                task.cancel()

    async def GetRequest(self, request: Any, context: Any) -> Any:  # noqa: N802
        await context.abort(grpc.StatusCode.NOT_FOUND, "unknown")

    async def GetSubmission(self, request: Any, context: Any) -> Any:  # noqa: N802
        await context.abort(grpc.StatusCode.NOT_FOUND, "unknown")


class Link:
    """One gateway's, and the requests that came over it."""

    def __init__(self, stub: Stub, context: Any) -> None:
        self._stub, self._context = stub, context
        self._live: dict[str, Live] = {}
        self._writing = asyncio.Lock()  # grpc takes one write at a time

    async def send(self, message: pb.ToGateway) -> None:
        async with self._writing:
            await self._context.write(message)

    async def take(self, message: pb.FromGateway) -> None:
        submits = self._stub.submits
        if message.HasField("submit"):
            id = message.submit.request_id
            self._live[id] = live = Live(message.submit)
            submits[id] = message.submit
            if len(submits) > REMEMBERED:
                del submits[next(iter(submits))]
            await self.send(pb.ToGateway(accepted=[id], deltas=[self._round(id, live)]))
        elif message.HasField("cancel"):
            self._live.pop(message.cancel.request_id, None)
        elif message.HasField("follow"):
            id = message.follow.request_id
            if (submit := submits.get(id)) is not None:
                live = Live(submit, min(message.follow.offset, submit.limits.max_tokens))
                if message.follow.most_tokens:
                    live.until = live.sent + message.follow.most_tokens
                self._live[id] = live

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            await self.send(pb.ToGateway())

    async def step(self) -> None:
        """A round of every live request in each `every_s` seconds, the messages evenly spread over that time."""
        loop, every_s = asyncio.get_running_loop(), self._stub.every_s
        due = loop.time()
        while True:
            due = max(due + every_s, loop.time() - every_s)
            if len(self._live) >= self._stub.hold:
                self._stub.hold = 0
            groups = [] if self._stub.hold else self._groups()
            for number, ids in enumerate(groups):
                await asyncio.sleep(due + number / len(groups) * every_s - loop.time())
                deltas = [self._round(id, self._live[id]) for id in ids if id in self._live]
                await self.send(pb.ToGateway(deltas=deltas))
            await asyncio.sleep(max(0.0, due - loop.time()))

    def _groups(self) -> list[list[str]]:
        ids = [id for id, live in self._live.items() if live.sent < live.until]
        return [ids[start : start + STEP] for start in range(0, len(ids), STEP)]

    def _round(self, id: str, live: Live) -> pb.Delta:
        most = max(1, live.submit.limits.max_tokens)  # a request for no token has one drawn all the same
        count = min(self._stub.tokens, most - live.sent)
        tokens = [self._stub.words[(live.sent + i) % len(self._stub.words)] for i in range(count)]
        delta = pb.Delta(request_id=id, start=live.sent, tokens=tokens, drafted=count, accepted=count - 1)
        sampling = live.submit.sampling
        if not live.sent and (sampling.embedding or sampling.HasField("prompt_logprobs")):
            delta.logprobs.CopyFrom(_of_prompt(live.submit))
        live.sent += count
        if live.sent >= most:
            delta.ending.finish_reason = types_pb2.FINISH_REASON_LENGTH
            del self._live[id]
        return delta


def _of_prompt(submit: pb.Submit) -> common_pb2.Logprobs:
    """Scores and embedding of the prompt, as far as its request wants them."""
    told = common_pb2.Logprobs(embedding=[1.0] if submit.sampling.embedding else [])
    if submit.sampling.HasField("prompt_logprobs"):
        told.prompt.extend(types_pb2.Logprob(logprob=-1.0) for _ in submit.prompt[1:])
    return told


def model_of(folder: Path) -> common_pb2.ModelInfo:
    """What a worker of the model in this folder would say of it, as far as a gateway reads it."""
    data = (folder / "tokenizer.json").read_bytes()
    size = Tokenizer.from_str(data.decode()).get_vocab_size()
    return common_pb2.ModelInfo(
        name="stub",
        fingerprint="stub",
        context_tokens=CONTEXT_TOKENS,
        vocab_size=size,
        tokenizer_json=gzip.compress(data, mtime=0),
        chat_template=TEMPLATE,
    )


async def serve(folder: Path, rounds_per_s: float, tokens_per_round: int, hold: int) -> None:
    """Prints the port once it is bound, and serves until it is killed."""
    model = model_of(folder)
    tokenizer = Tokenizer.from_str(gzip.decompress(model.tokenizer_json).decode())
    words = list(tokenizer.encode("The sky is blue because air scatters short waves more than long ones. ").ids)
    server = grpc.aio.server(options=options(LINK_MESSAGE_BYTES))
    stub = Stub(model, words, rounds_per_s, tokens_per_round, hold)  # type: ignore[abstract]  # of the stubs alone
    gateway_link_pb2_grpc.add_GatewayLinkServicer_to_server(stub, server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--model", type=Path, required=True)
    flags.add_argument("--rounds-per-s", type=float, required=True)
    flags.add_argument("--tokens-per-round", type=int, required=True)
    flags.add_argument("--hold", type=int, default=0)
    given = flags.parse_args()
    asyncio.run(serve(given.model, given.rounds_per_s, given.tokens_per_round, given.hold))
