"""How long the two phases of LAPS-SD last: when requests become perceptible, and how much service comes before. It
decides nothing."""

from dataclasses import dataclass, field, fields
from statistics import median

from scheduler_service.core.policies import LapsSd
from scheduler_service.core.types import View
from scheduler_service.sim.simulator import Trace


@dataclass(frozen=True, slots=True)
class Phases:
    """`perceptible`: the share of requests that became so. `half_round`: the round by which half of those had.
    `before`: the share of all request-rounds that ran before their request was perceptible."""

    perceptible: float
    half_round: float
    before: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched(LapsSd):
    """`laps-sd` that notes after how many of its rounds each request becomes perceptible."""

    rounds: dict[str, int] = field(default_factory=dict)

    def perceives(self, view: View) -> bool:
        perceived = LapsSd.perceives(self, view)
        if perceived:
            self.rounds[view.request.id] = view.acceptance.rounds
        return perceived


def watched(policy: LapsSd) -> Watched:
    return Watched(**{setting.name: getattr(policy, setting.name) for setting in fields(LapsSd)})


def phases(policy: Watched, trace: Trace) -> Phases:
    """Of a simulation under that policy."""
    ran = {outcome.job.id: outcome.record.acceptance.rounds for outcome in trace.outcomes}
    before = sum(policy.rounds.get(id, rounds) for id, rounds in ran.items())
    return Phases(
        perceptible=len(policy.rounds) / max(1, len(ran)),
        half_round=median(policy.rounds.values()) if policy.rounds else 0.0,
        before=before / max(1, sum(ran.values())),
    )
