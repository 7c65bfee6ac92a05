"""A scheduler for workers that does what a test says, and the model's thread alone."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos import version
from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import worker_link_pb2 as pb
from protos.link.v1.worker_link_pb2_grpc import WorkerLinkServicer
from tests.worker.harness import Tiny
from worker_service.pace import Pace, PacedRunner
from worker_service.runner import Runner

DEADLINE_S = 60.0
HOST_BLOCKS = 4
PROMPT = [10, 11, 12, 13, 14, 15, 16, 17]


@dataclass
class Attachment:
    """One stream, as the scheduler sees it."""

    hello: pb.Hello
    context: Any
    reports: asyncio.Queue[pb.StepReport] = field(default_factory=asyncio.Queue)
    parts: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)  # of the tokenizer
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # by the worker
    hang_up: asyncio.Event = field(default_factory=asyncio.Event)
    seq: int = 0

    async def welcome(self, epoch: int = 7, max_lag: int = 100, protocol: int = version.CURRENT) -> None:
        await self.context.write(pb.ToWorker(welcome=pb.Welcome(epoch=epoch, max_lag=max_lag, protocol=protocol)))

    async def tokenizer(self, size: int) -> bytes:
        """So many bytes of it, asked for."""
        await self.context.write(pb.ToWorker(describe=pb.Describe()))
        brought = b""
        while len(brought) < size:
            brought += await self.parts.get()
        return brought

    async def drain(self) -> None:
        await self.context.write(pb.ToWorker(drain=pb.Drain()))

    async def command(
        self,
        schedule: Sequence[str],
        admit: Sequence[pb.Admit] = (),
        *,
        epoch: int = 7,
        session: str | None = None,
        seen_step: int = 0,
        draft_len: int = 2,
        report_within_s: float = 0.0,
        **edits: Sequence[str],
    ) -> None:
        self.seq += 1
        runs = [pb.Run(request_id=name, draft_len=draft_len, prefill_tokens=64) for name in schedule]
        command = pb.StepCommand(
            epoch=epoch,
            session=session or self.hello.session,
            seq=self.seq,
            seen_step=seen_step,
            admit=admit,
            schedule=runs,
            report_within_s=report_within_s,
            **edits,
        )
        await self.context.write(pb.ToWorker(command=command))

    async def report(self) -> pb.StepReport:
        """The next one with rows."""
        while not (report := await self.reports.get()).rows:
            pass
        return report

    async def heartbeat(self) -> pb.StepReport:
        """The next report, which must be one without rows."""
        report = await self.reports.get()
        assert not report.rows
        return report


class ScriptedScheduler(WorkerLinkServicer):
    def __init__(self, refuses: str = "") -> None:
        """`refuses`: what every worker is told that comes; empty: none."""
        self._refuses = refuses
        self.older = False  # it speaks the oldest version alone
        self._attached: asyncio.Queue[Attachment] = asyncio.Queue()
        self.worker_told_to_drain = asyncio.Event()  # set by a test's own worker
        self.announced: asyncio.Queue[pb.AnnounceRequest] = asyncio.Queue()

    async def Announce(self, request: pb.AnnounceRequest, context: Any) -> None:  # noqa: N802
        await self.announced.put(request)
        if self._refuses:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self._refuses)
        await context.write(pb.Announced())
        await asyncio.Event().wait()

    async def Attach(self, requests: Any, context: Any) -> None:  # noqa: N802
        attachment = Attachment((await context.read()).hello, context)
        if self._refuses:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self._refuses)
        if self.older and attachment.hello.min_protocol > version.LEAST:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "upgrade the scheduler")
        await self._attached.put(attachment)
        reading = asyncio.create_task(self._read(attachment))
        await attachment.hang_up.wait()
        reading.cancel()

    async def _read(self, attachment: Attachment) -> None:
        try:
            while isinstance(message := await attachment.context.read(), pb.FromWorker):
                if message.HasField("tokenizer_part"):
                    await attachment.parts.put(message.tokenizer_part)
                else:
                    await attachment.reports.put(message.report)
        finally:
            attachment.ended.set()
            attachment.hang_up.set()

    async def attached(self) -> Attachment:
        return await self._attached.get()


def admit(name: str, output: Sequence[int] = (), *, placement: int = 1, max_tokens: int = 30) -> pb.Admit:
    return pb.Admit(
        request_id=name,
        placement=placement,
        tokens=[*PROMPT, *output],
        prompt_len=len(PROMPT),
        sampling=common_pb.Sampling(temperature=1, top_p=1, seed=5),
        limits=common_pb.Limits(max_tokens=max_tokens, ignore_eos=True),
    )


@asynccontextmanager
async def a_runner(tiny: Tiny, pace: Pace | None = None, **options: Any) -> AsyncIterator[Runner]:
    engine = tiny.engine(host_blocks=HOST_BLOCKS, **options)
    runner = PacedRunner(engine, 2, 1, pace) if pace else Runner(engine, slots=2, threads=1)
    runner.start()
    try:
        await asyncio.wrap_future(runner.warmed)
        yield runner
    finally:
        runner.stop()
        await asyncio.wait([asyncio.wrap_future(runner.ended)], timeout=DEADLINE_S)
