"""A cap on slowdown, which only simulations know: a request that has been there for so many times what it is believed
to need alone goes first, as one that is overdue does (core/overtaking.py)."""

import heapq
from collections.abc import Sequence

from scheduler_service.core.events import StepDone
from scheduler_service.core.policies import Policy
from scheduler_service.sim.plain import Plain
from scheduler_service.sim.simulator import Trace
from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job


class Capped(Plain):
    """`cap`: by how many times latency may exceed the time alone, by the belief when the request came."""

    def __init__(self, jobs: Sequence[Job], policy: Policy, fleet: SimFleet, cap: float) -> None:
        super().__init__(jobs, policy, fleet)
        self._cap = cap
        self._late: list[tuple[float, str]] = []  # a heap: from when on a request goes first

    def _submit(self, job: Job, now: float) -> None:
        super()._submit(job, now)
        fleet = self.core.fleet
        if (entry := fleet.entries.get(job.id)) is not None:
            alone_s = fleet.believed_rounds(entry) * fleet.known.round_s + entry.prefill_s
            heapq.heappush(self._late, (job.arrival_s + self._cap * alone_s, job.id))

    def _step_done(self, step: StepDone, now: float) -> None:
        super()._step_done(step, now)
        fleet = self.core.fleet
        while self._late and self._late[0][0] <= now:
            _, id = heapq.heappop(self._late)
            if (entry := fleet.entries.get(id)) is not None:
                entry.overdue = True
                fleet.rank(entry)


def simulate_capped(jobs: Sequence[Job], policy: Policy, fleet: SimFleet, cap: float) -> Trace:
    """Run `jobs` to their end under `policy` with that cap."""
    return Capped(jobs, policy, fleet, cap).run()
