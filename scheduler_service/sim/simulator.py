"""The virtual clock: arrivals and ends of rounds in order of time, each folded into the core as the live shell would.

Deterministic: no randomness at all, and ties are broken by arrival before end of round, then by worker.
"""

import heapq
from array import array
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from operator import sub
from typing import ClassVar

from scheduler_service.core import placement
from scheduler_service.core.core import Core
from scheduler_service.core.events import CostChanged, Round, StepDone, Submitted
from scheduler_service.core.policies import Policy
from scheduler_service.core.types import UNBOUNDED, Bounds, Ended, QueueIsFull, Record, TooLarge, counted_ids
from scheduler_service.predictor.port import Predictor
from scheduler_service.sim.apart_worker import ApartWorker
from scheduler_service.sim.lean import Lean
from scheduler_service.sim.worker import SimFleet, SimWorker
from scheduler_service.sim.workload import Job

SAMPLES = 200  # of the queue levels, and of the progress, over one simulation


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one job fared. `record` is what the core knew of it at its end; times in seconds of the virtual clock."""

    job: Job
    record: Record
    first_token_s: float
    end_s: float
    longest_gap_s: float = 0.0  # between two deliveries: the longest pause that its client saw

    @property
    def latency_s(self) -> float:
        return self.end_s - self.job.arrival_s


@dataclass(slots=True)
class Trace:
    """All that came of a simulation."""

    outcomes: list[Outcome] = field(default_factory=list)
    failed: list[Job] = field(default_factory=list)  # larger than the whole KV budget
    refused: list[Job] = field(default_factory=list)  # for want of room
    gaps_s: "array[float]" = field(default_factory=lambda: array("d"))  # between two deliveries of the same request
    levels: list[tuple[float, Counter[int]]] = field(default_factory=list)  # at some arrivals: live requests by level
    rounds: int = 0  # request-rounds simulated
    drafts: int = 0  # of them with drafts


def max_tokens(jobs: Sequence[Job]) -> int:
    """The bound on output that every request gets: a power of two, so that it tells nothing of one job."""
    return int(2 ** max(job.output_tokens for job in jobs).bit_length())


class Simulation:
    """One policy on one workload. `progress` is called now and then with the number of jobs that have ended. `LEAN`:
    rounds that change nothing are neither reported nor planned; who looks at each of them takes `Plain` (plain.py)."""

    LEAN: ClassVar[bool] = True

    def __init__(
        self,
        jobs: Sequence[Job],
        policy: Policy,
        fleet: SimFleet,
        progress: Callable[[int], None] | None = None,
        predictor: Predictor | None = None,
        bounds: Bounds = UNBOUNDED,
        most_tokens: int = 0,
    ) -> None:
        self.trace = Trace()
        self._arrivals = sorted((job for job in jobs if fleet.can_hold(job)), key=lambda job: job.arrival_s)
        self.trace.failed = [job for job in jobs if not fleet.can_hold(job)]
        self._jobs = {job.id: job for job in jobs}
        self._max_tokens = most_tokens or max_tokens(jobs)
        self.several = not jobs or len({(job.klass, job.tenant) for job in jobs}) > 1  # classes or tenants, perhaps
        self._arrived = 0  # those that were refused, too
        self._fleet = fleet
        self._predictor = predictor
        self._progress = progress or (lambda ended: None)
        self._sample_every = max(1, len(jobs) // SAMPLES) if jobs else inf  # nobody reads those of a cell
        self.core = Core(
            policy,
            draft_len=fleet.draft_len,
            prefill_chunk=fleet.prefill_chunk,
            bounds=bounds,
            plans_lag=fleet.plan_lag > 0,
            ready_first=fleet.apart is not None and fleet.apart.ready_first,
            foresight=fleet.foresight,
        )
        names = [f"w{number}" for number in range(fleet.workers)]
        kind = ApartWorker if fleet.apart else SimWorker
        self._workers = {name: kind(name, self.core, self._jobs, fleet) for name in names}
        for name in names:
            self.core.observe(fleet.worker_up(name), 0.0)
        alone = fleet.workers == 1 and not fleet.plan_lag and not fleet.apart and fleet.draft_len is not None
        fits = alone and self.LEAN and not (policy.pause_bound_s or fleet.foresight)
        self._lean = Lean(self, self.core, self._workers[names[0]], fleet) if fits else None
        self._leanly = False  # whether it runs the rounds at present
        self._idle = set(names)
        self._ends: list[tuple[float, str, StepDone]] = []  # a heap: one entry for each busy worker
        self._last_s: dict[str, float] = {}  # when a live request last delivered tokens
        self._first_s: dict[str, float] = {}
        self._longest_s: dict[str, float] = {}  # the longest gap between two deliveries

    def run(self) -> Trace:
        self.advance(inf)
        if self.core.fleet.entries:
            raise RuntimeError(f"{len(self.core.fleet.entries)} requests wait, yet no worker can run one")
        return self.trace

    def offer(self, job: Job) -> None:
        """One more, that arrives no earlier than those before it, nor than `advance` has come."""
        self._jobs[job.id] = job
        (self._arrivals if self._fleet.can_hold(job) else self.trace.failed).append(job)

    def advance(self, until_s: float) -> None:
        """All that happens by then."""
        ends = self._ends
        while self._arrived < len(self._arrivals) or ends or self._leanly:
            if self._lean and self._leanly:
                self._leanly = self._lean.run(until_s) is False
                if self._leanly:
                    return
                self._plan_idle(self._lean.now)
                continue
            next_arrival = self.next_arrival_s()
            now = min(next_arrival, ends[0][0]) if ends else next_arrival
            if now > until_s:
                return
            self.arrive(now)
            while ends and ends[0][0] <= now:
                _, name, step = heapq.heappop(ends)
                self._step_done(step, now)
                self._idle.add(name)
                if self._fleet.plan_lag:
                    self._begin(name, now)  # by the plan that stands: the answer to this report comes too late
                    self._answer(name, now)
            if self._lean and not ends and self._lean.enter(now):
                self._leanly = True
            elif not self._fleet.plan_lag:
                self._plan_idle(now)

    def next_arrival_s(self) -> float:
        return self._arrivals[self._arrived].arrival_s if self._arrived < len(self._arrivals) else inf

    def arrive(self, now: float) -> None:
        """Submit all that have come by then."""
        while self._arrived < len(self._arrivals) and self._arrivals[self._arrived].arrival_s <= now:
            self._submit(self._arrivals[self._arrived], now)
            self._arrived += 1
            if self._arrived % self._sample_every == 0:
                if self._lean and self._leanly and self.core.fleet.policy.levels > 1:
                    self._lean.settle()
                levels = Counter(entry.claim.level for entry in self.core.fleet.entries.values())
                self.trace.levels.append((now, levels))

    def _plan_idle(self, now: float) -> None:
        for name in sorted(self._idle) if len(self._idle) > 1 else tuple(self._idle):
            self._plan(name)
            self._begin(name, now)

    def _submit(self, job: Job, now: float) -> None:
        """With plan lag, as live: the worker that it concerns gets a new plan at once."""
        request = job.request(self._max_tokens)
        if self._predictor and request.expected is None:
            request = replace(request, expected=self._predictor.predict(job.features()))
        try:
            self.core.observe(Submitted(request), now)
        except (QueueIsFull, TooLarge):
            self.trace.refused.append(job)
            return
        if self._fleet.plan_lag and (name := placement.called_for(self.core.fleet, request.id)) is not None:
            self._answer(name, now)

    def _answer(self, name: str, now: float) -> None:
        """Plan for the worker of an event, and then for the workers that this plan concerns, as the live scheduler
        does. A worker that has nothing to run begins at once; the others begin at the end of their round.
        """
        due = deque([name])
        while due:
            name = due.popleft()
            concerned = self._plan(name)
            if (idle := placement.idle_beside_work(self.core.fleet)) not in (None, name):
                concerned.insert(0, idle)
            due.extend(other for other in dict.fromkeys(concerned) if other not in due)
            if name in self._idle:
                self._begin(name, now)

    def _plan(self, name: str) -> list[str]:
        """A new plan for that worker. Returns the workers that have to forget what it moves there."""
        moved = self._workers[name].obey(self.core.plan(name))
        if not moved:
            return []
        return [other for other, worker in self._workers.items() if other != name and worker.knows(moved)]

    def _begin(self, name: str, now: float) -> None:
        """The worker's next round, if its plan has something to run."""
        if (step := self._workers[name].step(now)) is not None:
            self._idle.remove(name)
            heapq.heappush(self._ends, (now + step.duration_s, name, step))

    def _step_done(self, step: StepDone, now: float) -> None:
        effects = self.core.observe(step, now)
        if (cost := self._workers[step.worker].cost_told()) is not None:
            self.core.observe(CostChanged(step.worker, cost), now)
        counted = {id for effect in effects for id in counted_ids(effect)}
        for row in step.rounds:
            if row.id in counted:
                self._served(row, now)
        for effect in effects:
            if isinstance(effect, Ended):
                self.ended(effect, now)

    def _served(self, row: Round, now: float) -> None:
        """A round that counts."""
        self.trace.drafts += row.drafted > 0
        if row.new:
            self.delivered(row.id, now)
        else:
            self.trace.rounds += 1

    # ---- what the lean loop asks and tells, too ----

    def job(self, id: str) -> Job:
        return self._jobs[id]

    def delivered(self, id: str, now: float) -> None:
        """A round that counts brought tokens."""
        self.trace.rounds += 1
        last = self._last_s.get(id)
        self._last_s[id] = now
        if last is None:
            self._first_s[id] = now
            self._longest_s[id] = 0.0
        else:
            gap_s = now - last
            self.trace.gaps_s.append(gap_s)
            if gap_s > self._longest_s[id]:
                self._longest_s[id] = gap_s

    def passed(self, ends_s: Sequence[float], requests: int) -> None:
        """So many requests had tokens at each of these times, of which the first is told already."""
        gaps_s = array("d", map(sub, ends_s[1:], ends_s))
        self.trace.gaps_s.extend(gaps_s * requests)
        self.trace.rounds += requests * len(gaps_s)

    def left(self, id: str, now: float, longest_s: float, drafts: int) -> None:
        """It had tokens now, and before that at times no further apart; so many of these rounds had drafts."""
        self._last_s[id] = now
        self._longest_s[id] = max(self._longest_s[id], longest_s)
        self.trace.drafts += drafts

    def ended(self, ended: Ended, now: float) -> None:
        id = ended.record.request.id
        del self._last_s[id]
        self._learn(ended)
        first_s, longest_s = self._first_s.pop(id), self._longest_s.pop(id)
        self.trace.outcomes.append(Outcome(self._jobs[id], ended.record, first_s, now, longest_s))
        if len(self.trace.outcomes) % self._sample_every == 0:
            self._progress(len(self.trace.outcomes))

    def _learn(self, ended: Ended) -> None:
        """At the same points in every run of equal inputs; live, a process of its own does it."""
        if self._predictor:
            record, seen = ended.record, ended.record.acceptance
            features = self._jobs[record.request.id].features()
            self._predictor.observe(features, record.emitted, seen.drafted, seen.accepted, cut=ended.cut)
            if self._predictor.due:
                self._predictor.refit()


def simulate(
    jobs: Sequence[Job],
    policy: Policy,
    fleet: SimFleet,
    progress: Callable[[int], None] | None = None,
    predictor: Predictor | None = None,
) -> Trace:
    """Run `jobs` to their end under `policy`. `predictor` learns from those that ended; None: nothing is predicted."""
    return Simulation(jobs, policy, fleet, progress, predictor).run()
