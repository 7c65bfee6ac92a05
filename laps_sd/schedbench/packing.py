"""What it brings and costs when workers pack rounds into reports (`report_within_ms`): the rounds of these workers take
as long as a GPU's, and each setting serves the same requests with the same luck."""

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from random import Random
from statistics import fmean
from typing import Any

from laps_sd.options import Options
from laps_sd.schedbench.gateways import Gateway
from laps_sd.schedbench.peers import running, start
from laps_sd.schedbench.processes import started, used_s
from laps_sd.schedbench.workers import Request, Worker
from protos.link.v1 import gateway_link_pb2
from protos.link.v1 import worker_link_pb2 as pb

ROUND_S = 0.025
MOST_PACKED = 4  # rounds in a row: a quarter of MAX_LAG
MAX_LAG = 16  # rounds that a worker runs beyond the last report that its command has seen
REQUESTS_A_SLOT = 8  # of the workload: latencies are means over all of them
ALL_S = 300.0  # for all requests to end


@dataclass(slots=True)
class Unreported:
    """What a worker has not yet said of a request, and what it has: `known` are pairs of a step and the rounds that
    had been reported with it."""

    rounds: int = 0
    known: deque[tuple[int, int]] = field(default_factory=lambda: deque([(0, 0)], maxlen=MAX_LAG + 1))
    row: pb.Row | None = None  # all rounds since the last report of this request
    since_s: float = 0.0  # when the first of them ended


class PackingWorker(Worker):
    """Runs a round every `round_s` by its newest command, and reports each request as late as the command lets it: at
    once when it starts or ends, or when the command preempts it."""

    def __init__(self, target: str, number: int, slots: int, within_ms: int) -> None:
        super().__init__(target, number, slots)
        self.round_s = ROUND_S
        self._within_s = within_ms / 1000
        self.commands = self.rows = 0
        self.late: list[int] = []  # one for each preemption: rounds of the request that the command did not know
        self.stood_s = 0.0  # it had run as far ahead of its commands as it may
        self._newest = pb.StepCommand()
        self._changed = asyncio.Event()
        self._unreported: dict[str, Unreported] = {}
        self._ran: set[str] = set()  # in the last round, and have not ended

    async def _serve(self, call: Any) -> None:
        await asyncio.gather(self._read(call), self._run(call))

    async def _read(self, call: Any) -> None:
        while True:
            command = await self._command(call)
            if not command.seq:
                continue  # a heartbeat
            self.commands += 1
            self._obey(command)
            for admit in command.admit:
                request = self._requests[admit.request_id]
                request.luck = Random(admit.request_id)  # the same at every setting
                request.acceptance = request.luck.betavariate(5, 3)
                self._unreported[admit.request_id] = Unreported()
            self._newest = command
            self._changed.set()

    async def _run(self, call: Any) -> None:
        await self.go.wait()
        step, ends_s, rounds_at = 0, time.perf_counter(), deque([(0, 0)], maxlen=256)
        while True:
            stands_s = time.perf_counter()
            while True:
                command = self._newest
                known = max((rounds for at, rounds in rounds_at if at <= command.seen_step), default=0)
                if command.schedule and self.rounds - known < MAX_LAG:
                    break
                self._changed.clear()
                await self._changed.wait()
            now = time.perf_counter()
            self.stood_s += now - stands_s
            ends_s = max(ends_s, now) + self.round_s
            await asyncio.sleep(ends_s - now)
            report = self._round(command, step + 1)
            self._pack(report, command)
            if report.rows:
                step += 1
                rounds_at.append((step, self.rounds))
                self.rows += len(report.rows)
                await call.write(pb.FromWorker(report=report))

    def _pack(self, report: pb.StepReport, command: pb.StepCommand) -> None:
        """Leaves in the report what is due, all rounds since a request's last report in one row."""
        now = time.perf_counter()
        new = list(report.rows)
        del report.rows[:]
        ran, due = set(), []
        for row in new:
            mine = self._unreported[row.request_id]
            mine.rounds += 1
            if mine.row is None:
                mine.row, mine.since_s = row, now
            else:
                add(mine.row, row)
            if not row.finish:
                ran.add(row.request_id)
            full = mine.rounds - mine.known[-1][1] == MOST_PACKED
            if row.finish or row.prefilled or full or now + self.round_s > mine.since_s + self._within_s:
                due.append(mine)
        for id in self._ran - ran:
            if id in self._requests and self._requests[id].output < self._requests[id].max_tokens:
                mine = self._unreported[id]
                self.late.append(mine.rounds - max(rounds for at, rounds in mine.known if at <= command.seen_step))
                due.append(mine)
                if self._within_s:
                    mine.row = preempted(id, self._requests[id], mine.row)
        self._ran = ran
        for mine in due:
            if mine.row is not None:
                report.rows.append(mine.row)
            mine.row = None
            mine.known.append((report.step, mine.rounds))
        report.partial = not ran <= {row.request_id for row in report.rows}


def add(packed: pb.Row, row: pb.Row) -> None:
    """A further round of the same request."""
    name_rounds(packed)
    packed.tokens_per_round.append(len(row.tokens))
    packed.drafted_per_round.append(row.drafted)
    packed.accepted_per_round.append(row.accepted)
    packed.tokens.extend(row.tokens)
    packed.drafted += row.drafted
    packed.accepted += row.accepted
    packed.blocks = row.blocks
    packed.finish = row.finish


def name_rounds(row: pb.Row) -> None:
    """The figures of a single round, as those of a row of several."""
    if not row.tokens_per_round:
        row.tokens_per_round.append(len(row.tokens))
        row.drafted_per_round.append(row.drafted)
        row.accepted_per_round.append(row.accepted)


def preempted(id: str, request: Request, row: pb.Row | None) -> pb.Row:
    """What is said of a request that others replaced. `row`: its rounds that are not reported yet."""
    if row is None:
        row = pb.Row(request_id=id, placement=request.placement, start=request.output, blocks=request.blocks)
    else:
        name_rounds(row)
    row.skipped = pb.SKIP_PREEMPTED
    return row


class TimedGateway(Gateway):
    """Submits a fixed number of requests, so many at a time, and notes how long each takes."""

    def __init__(self, target: str, total: int) -> None:
        super().__init__(target, seed=0)
        self.latencies_s: list[float] = []
        self.gaps_s: list[float] = []  # between two deltas of a request
        self.all_sent, self.done = asyncio.Event(), asyncio.Event()
        self._to_come = total
        self._sent_s: dict[str, float] = {}
        self._last_s: dict[str, float] = {}

    def _request(self) -> gateway_link_pb2.Submit:
        submit = super()._request()
        self._sent_s[submit.request_id] = time.perf_counter()
        self._to_come -= 1
        if not self._to_come:
            self._goal = 0
            self.all_sent.set()
        return submit

    def _delta(self, delta: gateway_link_pb2.Delta) -> None:
        super()._delta(delta)
        now, id = time.perf_counter(), delta.request_id
        if id in self._last_s:
            self.gaps_s.append(now - self._last_s[id])
        self._last_s[id] = now
        if delta.HasField("ending"):
            del self._last_s[id]
            self.latencies_s.append(now - self._sent_s.pop(id))
            if not self._to_come and not self._sent_s:
                self.done.set()


async def measure(workers: int, waiting: int, slots: int, within_ms: int, options: Options) -> dict[str, Any]:
    """One setting of `report_within_ms`. Rates are those while the queue was full; latencies and gaps those of all
    requests, as their gateway saw them.

    Raises ConnectionError, GaveUp, NoServer, or TimeoutError if the requests do not end.
    """
    at_once = workers * slots + waiting
    flags = ("--report-within-ms", str(within_ms))
    async with started(options, at_once, flags=flags) as processes:
        peers = [PackingWorker(processes.target, number, slots, within_ms) for number in range(workers)]
        gateway = TimedGateway(processes.target, at_once + REQUESTS_A_SLOT * workers * slots)
        async with running(peers, [gateway]):
            await gateway.fill(at_once)
            start(peers)
            began_s, cpu_s = time.perf_counter(), used_s(processes.scheduler)
            async with asyncio.timeout(ALL_S):
                await gateway.all_sent.wait()
                took_s = time.perf_counter() - began_s
                rates = {
                    "commands_per_s": sum(peer.commands for peer in peers) / took_s,
                    "rows_per_s": sum(peer.rows for peer in peers) / took_s,  # reported
                    "busy": (used_s(processes.scheduler) - cpu_s) / took_s,
                    # of the workers' time: they had run as far ahead of their commands as they may
                    "stood_share": sum(peer.stood_s for peer in peers) / took_s / workers,
                }
                await gateway.done.wait()
    late = [rounds for peer in peers for rounds in peer.late]
    gaps = sorted(gateway.gaps_s)
    shape = {"workers": workers, "waiting": waiting, "slots": slots, "report_within_ms": within_ms}
    return {
        **shape,
        **rates,
        "mean_latency_s": fmean(gateway.latencies_s),
        "p99_gap_ms": 1000 * gaps[int(0.99 * len(gaps))],  # between two deltas of a request
        "preemptions": len(late),
        # mean: rounds of a preempted request that the plan which preempted it did not know
        "late_rounds": fmean(late) if late else 0.0,
        "most_late_rounds": max(late, default=0),
    }
