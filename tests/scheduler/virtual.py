"""The live scheduler on virtual time: its own services without a network, and workers without a model.

No real time passes: an event of the virtual clock is delivered, and all that it sets off is awaited.
"""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import gateway_link_pb2 as gateway_pb
from protos.link.v1 import worker_link_pb2 as worker_pb
from scheduler_service.config import Settings
from scheduler_service.core.events import Event, StepDone, Tick
from scheduler_service.core.types import Plan
from scheduler_service.leader import Leader
from scheduler_service.links.gateways import GatewayLink
from scheduler_service.links.workers import WorkerLink
from scheduler_service.predictor.fit import fit
from scheduler_service.predictor.model import Model
from scheduler_service.predictor.window import Snapshot, Window
from scheduler_service.sim.simulator import max_tokens
from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job
from scheduler_service.store import MemoryStore, Store
from scheduler_service.trainer import Trainer
from tests.scheduler.virtual_worker import Stream, WireWorker
from tests.waiting import WAIT_S


class TrainerAtOnce(Trainer):
    """In this process, within one turn of the loop."""

    async def fit(self, snapshot: Snapshot) -> Model:
        return fit(Window.of(snapshot))


class Gateway:
    """Submits, and hears of endings."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.stream = Stream(self._hear)
        self.live: set[str] = set()
        self.ended_at: dict[str, float] = {}
        self.reasons: Counter[int] = Counter()  # FinishReason
        self._clock = clock

    def submit(self, job: Job, most: int, timeout_s: float | None = None) -> None:
        self.live.add(job.id)
        submit = gateway_pb.Submit(
            request_id=job.id,
            prompt=[1] * job.prompt_tokens,
            limits=common_pb.Limits(max_tokens=most),
            predicted_tokens=job.predicted_output_tokens,
            tenant=job.tenant,
            timeout_s=timeout_s,
            priority=int(job.klass),
        )
        self.stream.said.put_nowait(gateway_pb.FromGateway(submit=submit))

    def follow(self, id: str) -> None:
        """One that another scheduler admitted."""
        self.live.add(id)
        self.stream.said.put_nowait(gateway_pb.FromGateway(follow=gateway_pb.Follow(request_id=id)))

    def cancel(self, id: str) -> None:
        self.stream.said.put_nowait(gateway_pb.FromGateway(cancel=gateway_pb.Cancel(request_id=id)))

    def _hear(self, message: gateway_pb.ToGateway) -> None:
        assert not message.refusals, message.refusals
        for delta in message.deltas:
            if delta.HasField("ending"):
                self.live.discard(delta.request_id)
                self.ended_at[delta.request_id] = self._clock()
                self.reasons[delta.ending.finish_reason] += 1


Line = tuple[float, str, object]  # when, to or for whom, what


@dataclass
class Live:
    """One scheduler process and its peers, and the virtual clock that moves them."""

    jobs: dict[str, Job]
    fleet: SimFleet
    store: Store = field(default_factory=MemoryStore)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.lines: list[Line] = []
        self.workers: dict[str, WireWorker] = {}
        self._lives = 0
        self._rounds: dict[tuple[str, int], int] = {}
        self.most = max_tokens(list(self.jobs.values()))

    @asynccontextmanager
    async def leading(self, **settings: Any) -> AsyncIterator["Live"]:
        """A scheduler's life."""
        fleet = self.fleet
        settings = {
            "predictor": "none",
            "max_backlog_s": math.inf,
            "draft_len": "auto" if fleet.draft_len is None else fleet.draft_len,
            "prefill_chunk": fleet.prefill_chunk,
        } | settings
        chosen = Settings(_cli_parse_args=False, **settings)  # type: ignore[call-arg]
        self.leader = leader = Leader(chosen, self.store, lambda: self.now, TrainerAtOnce())
        await leader.lead()
        listen(leader.core, self.lines)
        self.gateway = Gateway(lambda: self.now)
        background = (leader.learning.run, leader.recovery.run)
        self._tasks = [leader.persisting, *(asyncio.create_task(run()) for run in background)]
        await self._until(lambda: not leader.recovery.unread)
        self._start(GatewayLink(lambda: leader).Link, self.gateway.stream)
        for id in leader.core.fleet.entries:
            self.gateway.follow(id)
        try:
            with mock.patch("scheduler_service.links.gateways.FLUSH_S", 0.0):  # no real time passes
                yield self
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await leader.learning.close()
            if leader.event_log is not None:
                leader.event_log.close()
            self.workers.clear()

    def _start(self, handler: Any, stream: Stream) -> None:
        self._tasks.append(asyncio.create_task(handler(stream, stream)))

    async def attach(self, name: str) -> WireWorker:
        self._lives += 1
        worker = self.workers[name] = WireWorker(name, str(self._lives), self.jobs, self.fleet, self._rounds)
        worker.stream.said.put_nowait(worker_pb.FromWorker(hello=worker.hello()))
        self._start(WorkerLink(lambda: self.leader).Attach, worker.stream)
        await self._until(lambda: worker.welcome.epoch > 0)
        await self.settle()
        return worker

    async def lose(self, name: str) -> None:
        """The worker hangs up, whatever it was at."""
        self.workers.pop(name).stream.said.put_nowait(None)
        await self._until(lambda: name not in self.leader.sessions)
        await self.settle()

    async def submit(self, job: Job, timeout_s: float | None = None) -> None:
        self.gateway.submit(job, self.most, timeout_s)
        await self.settle()

    async def tick(self) -> None:
        """What is past its deadline expires."""
        self.leader.durable.apply(Tick())
        await self.settle()

    async def end_round(self, worker: WireWorker) -> None:
        """It reports, and begins the next round by the command that stands: the answer comes too late for that."""
        report, worker.report = worker.report, None
        worker.begin(self.now)
        worker.stream.said.put_nowait(worker_pb.FromWorker(report=report))
        await self.settle()

    async def settle(self) -> None:
        """Until nobody has anything left to do at this time; whoever idles obeys each command as it comes."""
        await self._until(self._settled)

    def _settled(self) -> bool:
        for worker in self.workers.values():
            if worker.commands and worker.report is None:
                worker.begin(self.now)
        leader = self.leader
        predictor = leader.learning._predictor
        return (
            leader.persister.behind == 0
            and not (predictor and predictor.due)
            and not any(session.wake.is_set() for session in leader.sessions.values())
            and self.gateway.stream.said.empty()
            and all(worker.stream.said.empty() for worker in self.workers.values())
            and self.gateway.live == set(leader.core.fleet.entries)
        )

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0)  # a turn of the loop: no time passes

    async def run(self, arrivals: Sequence[Job]) -> None:
        """All of them to their end."""
        left = list(arrivals)
        while left or self._next_end() is not None:
            worker = self._next_end()
            if left and (worker is None or left[0].arrival_s <= worker.ends_at):
                self.now = max(self.now, left[0].arrival_s)
                await self.submit(left.pop(0))
            else:
                await self.rounds(1)

    async def rounds(self, count: int) -> None:
        """The next ends of rounds; nothing arrives."""
        for _ in range(count):
            worker = self._next_end()
            assert worker is not None, "nobody is at work"
            self.now = worker.ends_at
            await self.end_round(worker)

    def _next_end(self) -> WireWorker | None:
        """Of the workers with a round in hand, the one that ends first."""
        busy = [worker for worker in self.workers.values() if worker.report]
        return min(busy, key=lambda worker: (worker.ends_at, worker.name), default=None)


def listen(core: Any, lines: list[Line]) -> None:
    """Have all that this core observes and plans noted; durations left out, which the wire rounds."""
    observe, plan = core.observe, core.plan

    def observing(event: Event, now: float) -> Any:
        lines.append(
            (now, "core", (event.worker, event.rounds, event.free_blocks) if isinstance(event, StepDone) else event)
        )
        return observe(event, now)

    def planning(worker: str) -> Plan:
        made: Plan = plan(worker)
        lines.append((0.0, worker, made))
        return made

    core.observe, core.plan = observing, planning
