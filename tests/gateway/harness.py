"""A scripted scheduler behind a real gRPC server, and a small tokenizer. No assertions live here."""

import asyncio
import gzip
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from gateway.app import Gateway, running
from gateway.config import Settings
from laps_sd.client import AsyncClient
from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import gateway_link_pb2 as pb
from protos.link.v1 import gateway_link_pb2_grpc as rpc
from protos.serving import BEAT_S, LINK_MESSAGE_BYTES, options
from protos.v1 import inference_pb2, types_pb2
from protos.v1 import status_pb2 as status_pb
from tests.waiting import WAIT_S

CONTEXT_TOKENS = 64
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system must come first') }}{% endif %}"
    "{{ bos_token }}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def train_tokenizer() -> Tokenizer:
    """Byte-level BPE with a few merges: any text can be said, most characters in several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog, the end"] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))]
    )
    return tokenizer


TOKENIZER = train_tokenizer()


def model_info(
    *, template: str = TEMPLATE, fingerprint: str = "one", context_tokens: int = CONTEXT_TOKENS, **engine: Any
) -> Any:
    return common_pb.ModelInfo(
        name="tiny",
        fingerprint=fingerprint,
        context_tokens=context_tokens,
        vocab_size=TOKENIZER.get_vocab_size(),
        eos_ids=[TOKENIZER.token_to_id("<eos>")],
        tokenizer_json=gzip.compress(TOKENIZER.to_str().encode()),
        chat_template=template,
        special_tokens={"bos_token": "<bos>", "eos_token": "<eos>"},
        **engine,
    )


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def ending(reason: int = types_pb2.FINISH_REASON_STOP, **fields: Any) -> pb.Ending:
    return pb.Ending(finish_reason=reason, **fields)


class Link:
    """The scheduler's end of one Link stream."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.metadata = dict(context.invocation_metadata())
        self._writing = asyncio.Lock()  # grpc takes one write at a time, and the link's beats come when they like
        self.received: asyncio.Queue[pb.FromGateway] = asyncio.Queue()
        self.cut = asyncio.Event()
        self.silent = False  # it does not even beat

    async def next(self, kind: str) -> Any:
        """The gateway's next message, which must be of `kind`."""
        message = await asyncio.wait_for(self.received.get(), WAIT_S)
        assert message.WhichOneof("kind") == kind, message
        return getattr(message, kind)

    async def send(self, **fields: Any) -> None:
        async with self._writing:
            await self._context.write(pb.ToGateway(**fields))

    async def accept(self) -> pb.Submit:
        submit: pb.Submit = await self.next("submit")
        await self.send(accepted=[submit.request_id])
        return submit

    async def delta(self, submit: pb.Submit, start: int, tokens: Sequence[int] = (), **fields: Any) -> None:
        await self.send(deltas=[pb.Delta(request_id=submit.request_id, start=start, tokens=tokens, **fields)])


class Scheduler(rpc.GatewayLinkServicer):
    """Greets each link with `serving` and hands it to the test."""

    def __init__(self) -> None:
        self.serving = pb.Serving(ready=True, model=model_info())
        self.known: dict[str, status_pb.RequestStatus] = {}
        self.submitted: dict[str, pb.Submit] = {}
        self.asked = asyncio.Event()
        self.silent: asyncio.Event | None = None  # no submission is told before it is set
        self.busy = False  # it refuses to list requests
        self._links: asyncio.Queue[Link] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        """Also after `stop`: on the same port, like a scheduler that was started again."""
        self._server = grpc.aio.server(options=options(LINK_MESSAGE_BYTES))
        rpc.add_GatewayLinkServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def link(self) -> Link:
        """The next link that the gateway opens."""
        return await asyncio.wait_for(self._links.get(), WAIT_S)

    async def Link(self, requests: Any, context: Any) -> None:  # type: ignore[override] # noqa: N802
        link = Link(context)
        await link.send(serving=self.serving)
        self._links.put_nowait(link)

        async def read() -> None:
            async for message in requests:
                if not message.HasField("follows"):
                    link.received.put_nowait(message)
                for follow in message.follows.follow:  # no test has to know how they were packed
                    link.received.put_nowait(pb.FromGateway(follow=follow))

        reading = asyncio.create_task(read())
        try:
            while not link.cut.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(link.cut.wait(), BEAT_S)
                if not link.silent:
                    await link.send()
        finally:
            reading.cancel()

    async def GetRequest(  # noqa: N802
        self, request: inference_pb2.GetRequestRequest, context: Any
    ) -> inference_pb2.GetRequestResponse:
        if request.request_id not in self.known:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"request {request.request_id} is unknown")
        return inference_pb2.GetRequestResponse(request=self.known[request.request_id])

    async def GetSubmission(self, request: pb.GetSubmissionRequest, context: Any) -> pb.Submit:  # noqa: N802
        self.asked.set()
        if self.silent is not None:
            await self.silent.wait()
        if request.request_id not in self.submitted:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"request {request.request_id} is unknown")
        return self.submitted[request.request_id]

    async def ListRequests(  # noqa: N802
        self, request: inference_pb2.ListRequestsRequest, context: Any
    ) -> inference_pb2.ListRequestsResponse:
        if self.busy:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many ask")
        known, start = list(self.known.values()), int(request.page_token or 0)
        end = start + (request.page_size or len(known))
        token = str(end) if end < len(known) else ""
        return inference_pb2.ListRequestsResponse(requests=known[start:end], next_page_token=token)

    async def Stats(self, request: inference_pb2.StatsRequest, context: Any) -> status_pb.StatsResponse:  # noqa: N802
        workers = [status_pb.WorkerStatus(worker_id="w")]
        return status_pb.StatsResponse(policy="laps-sd", model="tiny", waiting=3, workers=workers)


@asynccontextmanager
async def gateway(*schedulers: Scheduler, **settings: Any) -> AsyncIterator[Gateway]:
    """Of that scheduler, or of several, tried in that order."""
    where = ",".join(f"127.0.0.1:{each.port or 1}" for each in schedulers)  # nobody listens at 1
    values = {"grpc_port": 0, "http_port": 0, **({"scheduler": where} if schedulers else {}), **settings}
    async with running(Settings(**values)) as served:
        yield served


@asynccontextmanager
async def stack(
    *, template: str = TEMPLATE, context_tokens: int = CONTEXT_TOKENS, **settings: Any
) -> AsyncIterator[tuple[Scheduler, Link, AsyncClient]]:
    """A scheduler, its link to a ready gateway, and a client of that gateway."""
    scheduler = Scheduler()
    scheduler.serving = pb.Serving(ready=True, model=model_info(template=template, context_tokens=context_tokens))
    await scheduler.start()
    try:
        async with gateway(scheduler, **settings) as served, AsyncClient(served.grpc, max_retries=0) as client:
            link = await scheduler.link()
            await client.ready(WAIT_S)
            yield scheduler, link, client
    finally:
        await scheduler.stop()
