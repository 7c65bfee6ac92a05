"""Workers without a model that speak like real ones and cost next to nothing. Nothing is measured here."""

import asyncio
import time
from dataclasses import dataclass
from random import Random
from typing import Any

from protos import version
from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import worker_link_pb2 as pb
from protos.link.v1.worker_link_pb2_grpc import WorkerLinkStub
from protos.models import parts
from protos.serving import channel
from protos.v1 import types_pb2

CONTEXT_TOKENS = 8192
VOCABULARY = 32_000
BLOCK_TOKENS = 16
BLOCKS = 1 << 20
BUSY_S = 0.02  # what a worker says a round took: a scheduler plans with it
MODEL = common_pb.ModelInfo(
    name="none", fingerprint="none", context_tokens=CONTEXT_TOKENS, vocab_size=VOCABULARY, tokenizer_json=b"none"
)


@dataclass(slots=True)
class Request:
    """One request as a worker knows it."""

    placement: int
    output: int  # tokens so far
    max_tokens: int
    owed: int  # tokens of prompt without KV
    blocks: int  # of KV, beside those of new output
    acceptance: float
    luck: Random  # decides how many drafts are accepted


class Worker:
    """Once `go` is set it reports a round about `round_s` after the command that allows the round.

    `delays_s` has one entry a command that answered a report: seconds from the report sent to the command read.
    """

    def __init__(self, target: str, number: int, slots: int, model: common_pb.ModelInfo = MODEL) -> None:
        self.go, self.attached = asyncio.Event(), asyncio.Event()
        self.round_s = 0.0
        self.delays_s: list[float] = []
        self.rounds = 0
        self.reported = 0  # rows
        self._target, self._slots = target, slots
        self._random = Random(number)
        self._requests: dict[str, Request] = {}
        cost = pb.CostProfile(verify_s=BUSY_S, draft_s=1e-3, verify_slope_s=1e-4, prefill_token_s=1e-5)
        self._tokenizer = model.tokenizer_json
        self._hello = pb.Hello(
            protocol=version.CURRENT,
            min_protocol=version.TOKENIZER_ASKED_FOR,
            tokenizer_bytes=len(self._tokenizer),
            worker_id=f"worker-{number}",
            session=f"session-{number}",
            model=model,
            slots=slots,
            block_tokens=BLOCK_TOKENS,
            blocks=BLOCKS,
            max_draft=8,
            cost=cost,
        )
        self._hello.model.ClearField("tokenizer_json")

    async def run(self) -> None:
        """Until cancelled. Raises ConnectionError when the scheduler ends the stream."""
        async with channel(self._target) as link:
            call: Any = WorkerLinkStub(link).Attach()
            await call.write(pb.FromWorker(hello=self._hello))
            if (await read(call)).HasField("describe"):
                for part in parts(self._tokenizer):
                    await call.write(pb.FromWorker(tokenizer_part=part))
                await read(call)  # the welcome
            self.attached.set()
            await self._serve(call)

    async def _serve(self, call: Any) -> None:
        step, reported_at = 0, 0.0
        while True:
            command = (await read(call)).command
            now = time.perf_counter()
            self._obey(command)
            if not command.schedule or command.seen_step < step:
                continue  # a heartbeat, or a command that has not seen the last report
            if step:
                self.delays_s.append(now - reported_at)
            await self.go.wait()
            await asyncio.sleep(self._random.uniform(0.5, 1.5) * self.round_s)  # workers drift out of step
            step += 1
            report = self._round(command, step)
            self.reported += len(report.rows)
            reported_at = time.perf_counter()
            await call.write(pb.FromWorker(report=report))

    def _obey(self, command: pb.StepCommand) -> None:
        for id in command.forget:
            self._requests.pop(id, None)
        for admit in command.admit:
            self._requests[admit.request_id] = Request(
                placement=admit.placement,
                output=len(admit.tokens) - admit.prompt_len,
                max_tokens=admit.limits.max_tokens,
                owed=len(admit.tokens),
                blocks=admit.prompt_len // BLOCK_TOKENS + 1,
                acceptance=self._random.betavariate(5, 3),
                luck=self._random,
            )

    def _round(self, command: pb.StepCommand, step: int) -> pb.StepReport:
        """The first `slots` requests of the command that can run, each one round further."""
        report = pb.StepReport(
            epoch=command.epoch,
            session=command.session,
            step=step,
            command_seq=command.seq,
            free_blocks=BLOCKS // 2,
            verify_s=BUSY_S,
        )
        self.rounds += 1
        for run in command.schedule:
            request = self._requests.get(run.request_id)
            if request is None or request.output >= request.max_tokens:
                continue
            self._row(report, run, request)
            if len(report.rows) == self._slots:
                break
        return report

    def _row(self, report: pb.StepReport, run: pb.Run, request: Request) -> None:
        drafted, accepted = 0 if request.owed else run.draft_len, 0
        while accepted < drafted and request.luck.random() < request.acceptance:
            accepted += 1
        start = request.output
        new = min(accepted + 1, request.max_tokens - start)
        request.output += new
        report.rows.add(
            request_id=run.request_id,
            placement=request.placement,
            start=start,
            tokens=[7] * new,
            drafted=drafted,
            accepted=min(accepted, new),
            prefilled=request.owed,
            blocks=request.blocks + request.output // BLOCK_TOKENS,
            finish=types_pb2.FINISH_REASON_LENGTH if request.output >= request.max_tokens else 0,
        )
        request.owed = 0


async def read(call: Any) -> pb.ToWorker:
    """The scheduler's next message. Raises ConnectionError if it has ended the stream."""
    message = await call.read()
    if not isinstance(message, pb.ToWorker):
        raise ConnectionError(f"the scheduler hung up: {await call.code()}, {await call.details()}")
    return message
