"""Peers of a scheduler that cost next to nothing and speak like real ones: workers without a model, a gateway without
clients. No measuring of processes lives here."""

import asyncio
import itertools
import math
import time
from dataclasses import dataclass
from random import Random
from typing import Any

from protos import version
from protos.serving import channel
from protos.v1 import gateway_link_pb2, types_pb2
from protos.v1 import worker_link_pb2 as pb
from protos.v1.gateway_link_pb2_grpc import GatewayLinkStub
from protos.v1.worker_link_pb2_grpc import WorkerLinkStub

CONTEXT = 8192
VOCABULARY = 32_000
BLOCK_TOKENS = 16
BLOCKS = 1 << 20
PROMPT_TOKENS = 200
MEAN_TOKENS = 120.0  # of an answer; log-normal, as answers are
SIGMA = 0.8  # of its logarithm
UNACKNOWLEDGED = 256  # submissions on their way
FILL_S = 30.0  # for their acknowledgement
BUSY_US = 20_000  # what a worker says a round took: a scheduler plans with it
MODEL = gateway_link_pb2.ModelInfo(
    name="none", fingerprint="none", context_tokens=CONTEXT, vocab_size=VOCABULARY, tokenizer_json=b"none"
)


@dataclass(slots=True)
class _Request:
    placement: int
    output: int
    max_tokens: int
    owed: int  # tokens of prompt without KV
    acceptance: float


class Worker:
    """After `go` it reports a round about `round_s` after the command that allows it; what a round emits is its drafts'
    luck.

    `delays_s`: from each report to the command that has seen it, as this worker waited for it.
    """

    def __init__(self, target: str, number: int, slots: int) -> None:
        self.go, self.attached = asyncio.Event(), asyncio.Event()
        self.round_s = 0.0
        self.delays_s: list[float] = []
        self._target, self._slots = target, slots
        self._random = Random(number)
        self._requests: dict[str, _Request] = {}
        cost = pb.CostProfile(verify_s=BUSY_US / 1e6, draft_s=1e-3, verify_slope_s=1e-4, prefill_token_s=1e-5)
        self._hello = pb.Hello(
            protocol=version.CURRENT,
            worker_id=f"worker-{number}",
            session=f"session-{number}",
            model=MODEL,
            slots=slots,
            block_tokens=BLOCK_TOKENS,
            blocks=BLOCKS,
            max_draft=8,
            cost=cost,
        )

    async def run(self) -> None:
        """Until cancelled."""
        async with channel(self._target) as link:
            call: Any = WorkerLinkStub(link).Attach()
            await call.write(pb.FromWorker(hello=self._hello))
            await call.read()  # the welcome
            self.attached.set()
            step, reported_at = 0, 0.0
            while True:
                message = await call.read()
                if not isinstance(message, pb.ToWorker):
                    raise ConnectionError(f"the scheduler hung up: {await call.code()}, {await call.details()}")
                command, now = message.command, time.perf_counter()
                self._obey(command)
                if not command.rank or command.seen_step < step:
                    continue  # a heartbeat, or one that has not seen the last report
                if step:
                    self.delays_s.append(now - reported_at)
                await self.go.wait()
                await asyncio.sleep(self._random.uniform(0.5, 1.5) * self.round_s)  # not all of them at once
                step += 1
                report = self._round(command, step)
                reported_at = time.perf_counter()
                await call.write(pb.FromWorker(report=report))

    def _obey(self, command: pb.StepCommand) -> None:
        for id in command.forget:
            self._requests.pop(id, None)
        for admit in command.admit:
            output = len(admit.tokens) - admit.prompt_len
            self._requests[admit.request_id] = _Request(
                admit.placement, output, admit.limits.max_tokens, len(admit.tokens), self._random.betavariate(5, 3)
            )

    def _round(self, command: pb.StepCommand, step: int) -> pb.StepReport:
        report = pb.StepReport(
            epoch=command.epoch,
            session=command.session,
            step=step,
            command_seq=command.seq,
            free_blocks=BLOCKS // 2,
            verify_us=BUSY_US,
        )
        ran = 0
        for run in command.rank:
            request = self._requests.get(run.request_id)
            if request is None or request.output >= request.max_tokens:
                continue
            accepted = 0
            if not request.owed:
                while accepted < run.draft_len and self._random.random() < request.acceptance:
                    accepted += 1
            new = min(accepted + 1, request.max_tokens - request.output)
            report.rows.add(
                request_id=run.request_id,
                placement=request.placement,
                start=request.output,
                tokens=[7] * new,
                drafted=0 if request.owed else run.draft_len,
                accepted=min(accepted, new),
                prefilled=request.owed,
                blocks=(PROMPT_TOKENS + request.output + new) // BLOCK_TOKENS + 1,
                finish=types_pb2.FINISH_REASON_LENGTH if request.output + new >= request.max_tokens else 0,
            )
            request.owed = 0
            request.output += new
            ran += 1
            if ran == self._slots:
                break
        return report


class Gateway:
    """Keeps so many requests alive: one that ends is followed by another."""

    def __init__(self, target: str, seed: int) -> None:
        self.live = self.ended = 0
        self._goal = 0
        self._draws = 1
        self._target, self._random = target, Random(seed)
        self._numbers = itertools.count()
        self._missing = asyncio.Event()
        self._full = asyncio.Event()
        self._window = asyncio.Semaphore(UNACKNOWLEDGED)

    async def fill(self, live: int, draws: int = 1) -> None:
        """Returns when so many are alive, all of them durable. Each is the longest of so many draws; those that follow
        are drawn once."""
        self._goal, self._draws = live, draws
        self._full.clear()
        self._missing.set()
        await self._full.wait()
        self._draws = 1
        async with asyncio.timeout(FILL_S):
            for _ in range(UNACKNOWLEDGED):
                await self._window.acquire()
        for _ in range(UNACKNOWLEDGED):
            self._window.release()

    async def run(self) -> None:
        """Until cancelled. Raises ConnectionError."""
        async with channel(self._target) as link:
            call: Any = GatewayLinkStub(link).Link()
            await asyncio.gather(self._read(call), self._submit(call))

    async def _read(self, call: Any) -> None:
        while True:
            message = await call.read()
            if not isinstance(message, gateway_link_pb2.ToGateway):
                raise ConnectionError(f"the scheduler hung up: {await call.code()}, {await call.details()}")
            for refusal in message.refusals:
                raise ConnectionError(f"a request was refused: {refusal.message}")
            for _ in message.accepted:
                self._window.release()
            ended = sum(delta.HasField("ending") for delta in message.deltas)
            if ended:
                self.ended += ended
                self.live -= ended
                self._missing.set()

    async def _submit(self, call: Any) -> None:
        while True:
            await self._missing.wait()
            self._missing.clear()
            while self.live < self._goal:
                await self._window.acquire()
                self.live += 1
                await call.write(gateway_link_pb2.FromGateway(submit=self._request()))
            self._full.set()

    def _request(self) -> gateway_link_pb2.Submit:
        mean = math.log(MEAN_TOKENS) - SIGMA**2 / 2
        tokens = round(max(self._random.lognormvariate(mean, SIGMA) for _ in range(self._draws)))
        return gateway_link_pb2.Submit(
            request_id=f"request-{next(self._numbers)}",
            prompt=[self._random.randrange(VOCABULARY)] * PROMPT_TOKENS,
            limits=types_pb2.Limits(max_tokens=min(max(tokens, 1), CONTEXT - PROMPT_TOKENS)),
            sampling=types_pb2.Sampling(seed=self._random.getrandbits(63)),
            on_disconnect=types_pb2.ON_DISCONNECT_DETACH,
        )
