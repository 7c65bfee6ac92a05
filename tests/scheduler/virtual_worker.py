"""A worker without a model on virtual time, and a stream without a network. No scheduler lives here."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from protos import version
from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import worker_link_pb2 as worker_pb
from protos.v1 import types_pb2 as types_pb
from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job

MODEL = common_pb.ModelInfo(name="none", fingerprint="f", context_tokens=1 << 30, vocab_size=100)


class Stream:
    """A bidirectional call without a network, as its handler sees it. `None` is the end of what the peer says."""

    def __init__(self, heard: Callable[[Any], None]) -> None:
        self.said: asyncio.Queue[Any] = asyncio.Queue()
        self._heard = heard

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return version.METADATA

    async def read(self) -> Any:
        return await self.said.get()

    async def write(self, message: Any) -> None:
        self._heard(message)

    async def abort(self, code: object, message: str, **_: object) -> None:
        raise AssertionError(f"the scheduler hung up: {message}")


@dataclass
class Known:
    """What a worker knows of a request: lengths in tokens."""

    placement: int
    prompt: int
    tokens: int
    kv: int = 0
    offloaded: int = 0  # of it, in the host's memory


class WireWorker:
    """Carries out StepCommands as worker_link.proto says, on jobs whose outcome is known."""

    def __init__(self, name: str, life: str, jobs: dict[str, Job], fleet: SimFleet, rounds: dict[tuple[str, int], int]):
        self.name, self.session = name, f"{name}-{life}"
        self.stream = Stream(self.hear)
        self.welcome = worker_pb.Welcome()
        self.report: worker_pb.StepReport | None = None  # of the round in hand
        self.ends_at = 0.0
        self.commands: list[worker_pb.StepCommand] = []  # for the next round boundary
        self.cost: worker_pb.CostProfile | None = None  # to be said with the next round's report
        self._jobs, self._fleet = jobs, fleet
        self._rounds = rounds  # of which request and tokens of output: which round of its recording begins there
        self._known: dict[str, Known] = {}
        self._rank: Sequence[worker_pb.Run] = ()
        self._seq = self._step = 0
        self._ran: set[str] = set()
        self._exhausted = False  # its last round got nowhere: only another command can change that

    def hello(self) -> worker_pb.Hello:
        cost = self._fleet.costs.profile()
        return worker_pb.Hello(
            protocol=version.CURRENT,
            worker_id=self.name,
            session=self.session,
            model=MODEL,
            slots=self._fleet.slots,
            block_tokens=1,
            blocks=self._fleet.kv_budget_tokens,
            max_draft=self._fleet.max_draft,
            cost=worker_pb.CostProfile(
                draft_s=cost.draft_s,
                verify_s=cost.verify_s,
                verify_slope_s=cost.verify_slope_s,
                prefill_token_s=cost.prefill_token_s,
                verify_token_s=cost.verify_token_s,
                offload_block_s=cost.offload_block_s,
            ),
            host_blocks=self._fleet.host_kv_tokens,
        )

    def hear(self, message: worker_pb.ToWorker) -> None:
        if message.HasField("welcome"):
            self.welcome = message.welcome
        elif message.HasField("command"):  # else it is a heartbeat: a busy machine brings some about
            self.commands.append(message.command)

    @property
    def free(self) -> int:
        return self._fleet.kv_budget_tokens - sum(known.kv for known in self._known.values())

    def begin(self, now: float) -> bool:
        """A round boundary: obey, and run the first `slots` that can. Whether there is a round to report."""
        for command in self.commands:
            self._apply(command)
            if not command.schedule:
                self._say_so()
        self.commands.clear()
        if self._exhausted:
            return False
        rows: list[worker_pb.Row] = []
        drafted = verified = prefilled = resumed = restored = 0
        ran: set[str] = set()
        for run in self._rank:
            if len(ran) == self._fleet.slots:
                break
            if run.request_id in self._known:
                kept = self._known[run.request_id].kv > 0 and run.request_id not in self._ran
                offloaded = self._known[run.request_id].offloaded
                row = self._row(run)
                rows.append(row)
                if row.skipped:
                    continue
                ran.add(run.request_id)
                resumed += kept
                restored += offloaded
                drafted = max(drafted, row.drafted)
                verified += row.drafted + 1 if row.tokens else 0
                prefilled += row.prefilled
        if not rows:
            return False
        self._exhausted = not ran
        for row in rows:
            if row.finish:  # what it held is free after the round, not within it
                del self._known[row.request_id]
        self._ran = ran
        self._step += 1
        step_s = self._fleet.costs.step_s(drafted, len(ran), verified, prefilled, resumed, restored)
        duration_s = step_s if ran else 0.0
        self.ends_at = now + duration_s
        self.report = worker_pb.StepReport(
            epoch=self.welcome.epoch,
            session=self.session,
            step=self._step,
            command_seq=self._seq,
            rows=rows,
            free_blocks=self.free,
            verify_s=duration_s,
            cost=self.cost,
        )
        self.cost = None
        return True

    def _say_so(self) -> None:
        """That nobody is listed, and nothing is under way any more."""
        done = worker_pb.StepReport(epoch=self.welcome.epoch, session=self.session, step=self._step)
        done.command_seq = self._seq
        self.stream.said.put_nowait(worker_pb.FromWorker(report=done))

    def _apply(self, command: worker_pb.StepCommand) -> None:
        if command.forget or command.drop or command.offload or command.admit or command.schedule != self._rank:
            self._exhausted = False
        for id in command.forget:
            self._known.pop(id, None)
        for id in command.drop:
            if id in self._known:
                self._known[id].kv = 0
        for id in command.offload:
            if id in self._known:
                known = self._known[id]
                known.kv, known.offloaded = 0, known.kv
        assert sum(known.offloaded for known in self._known.values()) <= self._fleet.host_kv_tokens
        for admit in command.admit:
            tokens = len(admit.tokens)
            known = self._known.get(admit.request_id) or Known(0, 0, 0)
            self._known[admit.request_id] = Known(
                admit.placement, admit.prompt_len, tokens, min(known.kv, tokens), min(known.offloaded, tokens)
            )
        self._rank, self._seq = command.schedule, command.seq

    def _row(self, run: worker_pb.Run) -> worker_pb.Row:
        known, job = self._known[run.request_id], self._jobs[run.request_id]
        start = known.tokens - known.prompt
        row = worker_pb.Row(request_id=run.request_id, placement=known.placement, start=start)
        owed = known.tokens - known.kv - known.offloaded
        row.prefilled = min(owed, run.prefill_tokens)
        row.prefill_owed = owed - row.prefilled
        new = 0
        if not row.prefill_owed:
            row.drafted = run.draft_len
            round = self._rounds.get((job.id, start), 0)
            hits = job.accepts(round, run.draft_len)
            new = min(hits + 1, job.output_tokens - start)
            self._rounds[job.id, start + new] = round + (run.draft_len > 0 or not row.prefilled)
            row.accepted = min(hits, new)
        if known.offloaded + row.prefilled + new > self.free:
            return worker_pb.Row(
                request_id=run.request_id,
                placement=known.placement,
                start=start,
                prefill_owed=owed,
                blocks=known.kv,
                skipped=worker_pb.SKIP_NO_BLOCKS,
            )
        row.tokens.extend([1] * new)
        known.tokens += new
        known.kv += known.offloaded + row.prefilled + new
        known.offloaded = 0
        row.blocks = known.kv
        if start + new == job.output_tokens:
            row.finish = types_pb.FINISH_REASON_LENGTH
        return row
