"""The oracle: preemptive shortest true remaining rounds. Only a simulation can ask it; a reference, and with several
slots not a bound."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from laps_sd_vllm._core.scheduler_service.core.policies import Claim, Policy, make_policy
from laps_sd_vllm._core.scheduler_service.core.types import View
from laps_sd_vllm._core.scheduler_service.sim.workload import Job


@dataclass(frozen=True, slots=True)
class Oracle(Policy):
    """`rounds`: the true number of decoding rounds of a request in all, by its id."""

    preemptive: ClassVar[bool] = True
    asks: ClassVar[bool] = False

    rounds: Callable[[str], int]

    def claim(self, view: View, round_s: float) -> Claim:
        left = self.rounds(view.request.id) - view.acceptance.rounds
        return Claim(1, 0, left * round_s + (view.prefill_s if not view.acceptance.rounds else 0.0))


def parts(text: str) -> tuple[str, list[str]]:
    """Name and settings of a policy written as `name:setting=value:...`."""
    name, *settings = text.split(":")
    return name, settings


def simulated_policy(name: str, settings: Iterable[str], jobs: Sequence[Job], draft_len: int) -> Policy:
    """`make_policy`, and the oracle of these jobs. Raises ValueError that says what is wrong."""
    if name != "oracle":
        return make_policy(name, settings)
    if any(settings):
        raise ValueError("policy-set: the oracle has no settings")
    return Oracle({job.id: job.rounds(draft_len) for job in jobs}.__getitem__)
