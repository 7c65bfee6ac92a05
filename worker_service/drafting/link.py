"""The streams of workers: one for each. They carry messages; what is allowed is decided by the sessions, and what is
guessed by the model's thread."""

import asyncio
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import structlog

from protos.errors import BadInput, Incompatible, NotServing, QueueFull, RequestError
from protos.link.v1 import draft_link_pb2 as pb
from protos.link.v1 import draft_link_pb2_grpc as rpc
from protos.serving import BEAT_S, Stream, abort, first_of
from protos.silence import SILENT_S, Silence
from worker_service.drafting.computing import Computing, Told
from worker_service.drafting.metrics import Metrics
from worker_service.drafting.session import LONGEST_CHAIN, WIDEST_FAN, Bounds, Session

PROTOCOL = 1  # of this link
HELLO_TIMEOUT_S = 10.0


@dataclass(slots=True, eq=False)
class _Attached:
    session: Session
    wake: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Served:
    """What workers are served with, once it is there. `step_s`, `chain_s`: as in DraftWelcome."""

    computing: Computing
    bounds: Bounds
    model: str
    vocabulary: str
    step_s: float
    chain_s: float


class DraftLink(rpc.DraftLinkServicer):
    def __init__(self, most: int, metrics: Metrics) -> None:
        """`most`: sessions at a time."""
        self._most, self._metrics = most, metrics
        self._served: Served | None = None
        self._attached: dict[int, _Attached] = {}
        self._numbers = count(1)
        self.leaving = asyncio.Event()
        self._log = structlog.get_logger()

    def __len__(self) -> int:
        return len(self._attached)

    def serve(self, served: Served) -> None:
        self._served = served

    def tell(self, told: Told) -> None:
        """Guesses for sessions; those of sessions that are over are dropped."""
        for name, guess in told:
            if (attached := self._attached.get(name.session)) is not None:
                attached.session.take(name.handle, guess)
                attached.wake.set()

    async def Attach(self, requests: Any, context: Any) -> None:  # type: ignore[override] # noqa: N802
        log, number = self._log, next(self._numbers)
        ended: RequestError | None = None
        try:
            hello = await _hello(context)  # before any refusal: a worker whose write fails is not told the reason
            served = self._admit()
            _check(hello, served)
            attached = self._attached[number] = _Attached(Session(served.bounds))
            log = log.bind(worker=hello.worker_id[:100])
            await context.write(pb.FromDrafter(welcome=_welcome(served)))
            log.info("worker_attached")
            silence = Silence()
            await first_of(
                lambda: self._read(served.computing, number, attached, context, silence),
                lambda: self._write(attached, context),
                silence.lasts,
                self.leaving.wait,
            )
            if self.leaving.is_set():
                raise NotServing("this drafter is ending")
        except TimeoutError as error:
            ended = NotServing(str(error) or f"nothing was read for {SILENT_S:g} s")
        except RequestError as error:
            ended = error
        finally:
            if self._attached.pop(number, None) is not None and self._served is not None:
                self._served.computing.end(number)
        if ended is None:
            log.info("worker_detached")
            return
        self._metrics.refused[ended.code.name] += 1
        log.warning("worker_refused", reason=ended.message)
        await abort(context, ended)

    def _admit(self) -> Served:
        """Raises NotServing, QueueFull."""
        if self._served is None:
            raise NotServing("this drafter is loading its model")
        if self.leaving.is_set():
            raise NotServing("this drafter is ending")
        if len(self._attached) >= self._most:
            raise QueueFull(f"this drafter has {self._most} workers already")
        return self._served

    async def _read(
        self,
        computing: Computing,
        number: int,
        attached: _Attached,
        stream: Stream[pb.ToDrafter, pb.FromDrafter],
        silence: Silence,
    ) -> None:
        """Until the worker hangs up. A message is read once the model's thread has the one before: no queue grows."""
        while isinstance(message := await silence.read(stream), pb.ToDrafter):
            if message.HasField("hello"):
                raise BadInput("hello", "was said already")
            edits = attached.session.read(message.truths)
            if edits:
                await asyncio.wrap_future(computing.edit(number, edits))
            if attached.session.owes:
                attached.wake.set()

    async def _write(self, attached: _Attached, stream: Stream[pb.ToDrafter, pb.FromDrafter]) -> None:
        while True:
            try:
                async with asyncio.timeout(BEAT_S):
                    await attached.wake.wait()
            except TimeoutError:
                message = pb.FromDrafter()
            else:
                message = self._message(attached)
            async with asyncio.timeout(SILENT_S):
                await stream.write(message)

    def _message(self, attached: _Attached) -> pb.FromDrafter:
        chains = attached.session.send()
        if not attached.session.owes:
            attached.wake.clear()
        self._metrics.sent[""] += sum(len(chain.tokens) for chain in chains)
        return pb.FromDrafter(drafts=pb.Drafts(chains=chains))


async def _hello(stream: Stream[pb.ToDrafter, pb.FromDrafter]) -> pb.DraftHello:
    """The first message. Raises BadInput if it is none, or does not come in time."""
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            message = await stream.read()
    except TimeoutError:
        raise BadInput("hello", f"none came within {HELLO_TIMEOUT_S:.0f} s") from None
    if not isinstance(message, pb.ToDrafter) or not message.HasField("hello"):
        raise BadInput("hello", "must be the first message")
    return message.hello


def _check(hello: pb.DraftHello, served: Served) -> None:
    """Raises Incompatible."""
    if hello.protocol != PROTOCOL:
        older = "worker" if hello.protocol < PROTOCOL else "drafter"
        raise Incompatible(f"the worker speaks version {hello.protocol}, the drafter {PROTOCOL}: upgrade the {older}")
    if hello.vocabulary != served.vocabulary:
        raise Incompatible(f"{served.model} has another vocabulary than your model: its tokens mean something else")


def _welcome(served: Served) -> pb.DraftWelcome:
    bounds = served.bounds
    return pb.DraftWelcome(
        protocol=PROTOCOL,
        model=served.model,
        context_tokens=bounds.context_tokens,
        vocab_size=bounds.vocab_size,
        handles=bounds.handles,
        longest_chain=LONGEST_CHAIN,
        widest_fan=WIDEST_FAN,
        step_s=served.step_s,
        chain_s=served.chain_s,
    )
