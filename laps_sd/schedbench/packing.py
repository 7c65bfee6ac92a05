"""What it brings and costs when workers pack rounds into reports (`report_within_ms`): the rounds of these workers take
as long as a GPU's, and each setting serves the same requests with the same luck."""

import asyncio
import time
from collections import Counter, deque
from random import Random
from statistics import fmean
from typing import Any

from laps_sd.options import Options
from laps_sd.schedbench.gateways import Gateway
from laps_sd.schedbench.peers import running, start
from laps_sd.schedbench.processes import started, used_s
from laps_sd.schedbench.workers import Worker, read
from protos.link.v1 import gateway_link_pb2
from protos.link.v1 import worker_link_pb2 as pb
from worker_service.engine.types import Finish, Row
from worker_service.reporting import Report, Reporter, Seconds

ROUND_S = 0.025
MAX_LAG = 16  # rounds that a worker runs beyond the last report that its command has seen
REQUESTS_A_SLOT = 8  # of the workload: latencies are means over all of them
ALL_S = 300.0  # for all requests to end


class PackingWorker(Worker):
    """Runs a round every `round_s` by its newest command, and reports as a real worker does, by the same Reporter."""

    def __init__(self, target: str, number: int, slots: int) -> None:
        super().__init__(target, number, slots)
        self.round_s = ROUND_S
        self.commands = self.rows = 0
        self.late: list[int] = []  # one for each preemption: rounds of the request that the command did not know
        self.stood_s = 0.0  # it had run as far ahead of its commands as it may
        self._newest = pb.StepCommand()
        self._changed = asyncio.Event()
        self._reporter = Reporter(self._report, MAX_LAG // 4)
        self._reports: deque[pb.StepReport] = deque()  # to be sent
        self._rounds: Counter[str] = Counter()  # of each request
        self._known: dict[
            str, dict[int, int]
        ] = {}  # of each request: the rounds reported by then, by the report's step
        self._ran: set[str] = set()  # in the last round, and have not ended

    async def _serve(self, call: Any) -> None:
        await asyncio.gather(self._read(call), self._run(call))

    async def _read(self, call: Any) -> None:
        while True:
            command = (await read(call)).command
            if not command.seq:
                continue  # a heartbeat
            self.commands += 1
            self._obey(command)
            for admit in command.admit:
                request = self._requests[admit.request_id]
                request.luck = Random(admit.request_id)  # the same at every setting
                request.acceptance = request.luck.betavariate(5, 3)
                self._known[admit.request_id] = {0: self._rounds[admit.request_id]}
            self._newest = command
            self._changed.set()

    async def _run(self, call: Any) -> None:
        await self.go.wait()
        ends_s = time.perf_counter()
        while True:
            stands_s = time.perf_counter()
            while not (command := self._newest).schedule or self.rounds - command.seen_step >= MAX_LAG:
                self._changed.clear()
                await self._changed.wait()
            now = time.perf_counter()
            self.stood_s += now - stands_s
            ends_s = max(ends_s, now) + self.round_s
            await asyncio.sleep(ends_s - now)
            self._step(command, time.perf_counter())
            while self._reports:
                await call.write(pb.FromWorker(report=self._reports.popleft()))

    def _step(self, command: pb.StepCommand, ended_s: float) -> None:
        report = self._round(command, self.rounds + 1)
        ran = {row.request_id for row in report.rows if not row.finish}
        for id in self._ran - ran:
            if id in self._requests and self._requests[id].output < self._requests[id].max_tokens:
                known = max(rounds for step, rounds in self._known[id].items() if step <= command.seen_step)
                self.late.append(self._rounds[id] - known)
        self._ran = ran
        self._rounds.update(row.request_id for row in report.rows)
        last = Report(report.step, report.command_seq, report.free_blocks, seconds=Seconds(verify=report.verify_s))
        self._reporter.add(last, map(to_row, report.rows), ended_s, self.round_s, command.report_within_s)

    def _report(self, report: Report) -> None:
        from worker_service.wire import of_report  # brings grammars along, which only this bench needs

        for rows in report.rounds:
            self._known[rows[-1].request_id][report.step] = self._rounds[rows[-1].request_id]
        self.rows += len(report.rounds)
        self._reports.append(of_report(report, self._newest.epoch, self._newest.session))


def to_row(row: pb.Row) -> Row:
    """As the engine would give it."""
    return Row(
        row.request_id,
        row.placement,
        row.start,
        tuple(row.tokens),
        row.drafted,
        row.accepted,
        row.prefilled,
        row.blocks,
        finish=Finish.LENGTH if row.finish else None,
    )


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
        peers = [PackingWorker(processes.target, number, slots) for number in range(workers)]
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
