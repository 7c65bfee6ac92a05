"""How requests fare under vLLM's own order or ours, and how they would have fared under other policies. Nothing is
decided here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from laps_sd_vllm.background import COMPARE, COMPARE_S, Background
from laps_sd_vllm.requests import Ended, Live, Recent
from laps_sd_vllm.side_by_side import ANSWER, Figures, told
from laps_sd_vllm.steps import TO_THE_END, StepDone
from scheduler_service.core.costs import CostProfile
from scheduler_service.core.types import Request
from scheduler_service.predictor.window import Row
from scheduler_service.sim.costs import StepCosts
from scheduler_service.sim.side_by_side import QUESTION, Question
from scheduler_service.sim.worker import SimFleet

LEAST = 8  # requests; fewer say nothing
SHARE = 10  # one that takes long is made so much more rarely
OTHERS = ("fcfs", "sjf", "srpt-length", "las", "laps-sd", "gittins", "oracle")
MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Comparison:
    """`policies`: figures by policy, as served under `measured`. `window_s`: from their first to their last arrival.
    `took_s`: to simulate them. `at`: when it was asked for, in seconds since the epoch."""

    policies: dict[str, Figures]
    requests: int
    window_s: float
    took_s: float
    at: float


class Watch:
    """`policy`: the configured one, with its settings behind colons. `clock`: seconds, to time simulations with."""

    def __init__(self, background: Background, fleet: SimFleet, policy: str, every_s: float) -> None:
        self.live: dict[str, Live] = {}
        self._background, self._fleet, self._every_s = background, fleet, every_s
        self._policies = list(dict.fromkeys([*OTHERS, policy]))
        self._recent = Recent()
        self._new = 0  # ended since the last comparison
        self._next_s = 0.0

    def submitted(self, request: Request, row: Row | None) -> None:
        self.live[request.id] = Live(request, row)

    def step(self, step: StepDone, now: float) -> list[Live]:
        """Returns those that ran to their end."""
        ended = []
        for row in step.rows:
            live = self.live.get(row.request_id)
            if live is not None:
                live.ran(row, now)
                if row.status is not None:
                    del self.live[row.request_id]
                    if row.status.name in TO_THE_END:
                        ended.append(live)
        for each in ended:
            self.ended(each, now)
        return ended

    def ended(self, live: Live, now: float) -> None:
        """It counts as one that ran to its end."""
        self._recent.add(live, now)
        self._new += 1

    def gone(self, id: str) -> Live | None:
        """It was aborted. What is known of it."""
        return self.live.pop(id, None)

    def compare(
        self, cost: CostProfile, now: float, clock: Callable[[], float], tell: Callable[[Comparison], None]
    ) -> None:
        """If that is due and says something: simulate the requests of the last minutes, in the background. `tell` is
        called there, in its thread."""
        if now < self._next_s or self._new < LEAST:
            return
        ended, background, fleet, policies = self._recent.since(now), self._background, self._fleet, self._policies
        if len(ended) < LEAST:  # the others are older
            return

        def job() -> Comparison:
            comparison = _compare(background, ended, fleet, cost, policies, now, clock)
            tell(comparison)
            return comparison

        if self._background.start("compare", job, process=True):
            self._new, self._next_s = 0, now + self._every_s

    def compared(self, comparison: Comparison) -> None:
        self._next_s = max(self._next_s, comparison.at + SHARE * comparison.took_s)


def _compare(
    background: Background,
    ended: Sequence[Ended],
    fleet: SimFleet,
    cost: CostProfile,
    policies: list[str],
    now: float,
    clock: Callable[[], float],
) -> Comparison:
    """Raises OSError, subprocess.TimeoutExpired, ValueError."""
    began = clock()
    arrivals = [each.live.request.arrival for each in ended]
    first, last = min(arrivals), max(arrivals)
    jobs = [each.job(number, first, fleet.max_draft) for number, each in enumerate(ended)]
    question = QUESTION.dump_json(Question(jobs, replace(fleet, costs=StepCosts.of(cost)), policies))
    figures = ANSWER.validate_json(background.run(COMPARE, question, COMPARE_S))
    figures[MEASURED] = told([each.latency_s for each in ended], max(each.live.pause_s for each in ended))
    return Comparison(figures, len(ended), last - first, clock() - began, now)
