"""The oracle: preemptive shortest true remaining rounds. Only a simulation can ask it; a reference, and with several
slots not a bound."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from scheduler_service.core.policies import Claim, Policy
from scheduler_service.core.types import CostProfile, View


@dataclass(frozen=True, slots=True)
class Oracle(Policy):
    """`rounds`: the true number of decoding rounds of a request in all, by its id."""

    preemptive: ClassVar[bool] = True

    rounds: Callable[[str], int]

    def claim(self, view: View, cost: CostProfile, draft_len: int, slots: int) -> Claim:
        left = self.rounds(view.request.id) - view.rounds
        return Claim(1, 0, left * cost.round_s(draft_len, slots) + (view.prefill_s if not view.rounds else 0.0))
