"""The oracle: preemptive shortest true remaining rounds. Only a simulation can ask it; a reference, and with several
slots not a bound. And how simulations take the text of a policy."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from scheduler_service.core.policies import Claim, Policy, make_policy
from scheduler_service.core.types import View
from scheduler_service.sim.nudge import Nudge
from scheduler_service.sim.workload import Job


@dataclass(frozen=True, slots=True)
class Oracle(Policy):
    """`rounds`: the true number of decoding rounds of a request in all, by its id."""

    preemptive: ClassVar[bool] = True
    asks: ClassVar[bool] = False

    rounds: Callable[[str], int]

    def claim(self, view: View, round_s: float) -> Claim:
        left = self.rounds(view.request.id) - view.acceptance.rounds
        return Claim(1, 0, left * round_s + (view.prefill_s if not view.acceptance.rounds else 0.0))

    def worst(self, view: View, round_s: float, rounds: int, tokens: int) -> Claim | None:
        return self.claim(view, round_s)  # it only gets nearer to its end


SIMULATED = ("oracle", "nudge")  # policies that no service can have


def parts(text: str) -> tuple[str, list[str]]:
    """Name and settings of a policy written as `name:setting=value:...`."""
    name, *settings = text.split(":")
    return name, settings


def simulated_policy(name: str, settings: Iterable[str], jobs: Sequence[Job], draft_len: int) -> Policy:
    """`make_policy`, and what only simulations have. Raises ValueError that says what is wrong."""
    if name == "nudge":
        return Nudge.parsed(settings)
    if name != "oracle":
        return make_policy(name, settings)
    if any(settings):
        raise ValueError("policy-set: the oracle has no settings")
    return Oracle({job.id: job.rounds(draft_len) for job in jobs}.__getitem__)
