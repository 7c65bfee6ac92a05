"""Shortest predicted remaining output length first, preemptive, blind to acceptance.

Source: Schrage, "A proof of the optimality of the shortest remaining processing time discipline", Operations Research
16(3), 1968, on predicted lengths; TRAIL (arXiv 2410.01035) is its kin for LLMs. Departures: the unit is tokens, and
an overrun prediction becomes emitted * (1 + margin), else such a request would look nearly finished for ever.
"""

from dataclasses import dataclass
from typing import ClassVar

from scheduler_service.core.policies.base import Claim, Policy
from scheduler_service.core.types import View


@dataclass(frozen=True, slots=True)
class SrptLength(Policy):
    preemptive: ClassVar[bool] = True
    monotone: ClassVar[bool] = True

    length_margin: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.length_margin <= 10:
            raise ValueError("policy-set: length_margin must be from 0 to 10")

    def claim(self, view: View, round_s: float) -> Claim:
        total = max(view.predicted_tokens, view.emitted * (1 + self.length_margin))
        return Claim(1, 0, total - view.emitted)

    def worst(self, view: View, round_s: float, rounds: int, tokens: int) -> Claim | None:
        emitted = view.emitted + tokens
        return Claim(1, 0, max(view.predicted_tokens - view.emitted, emitted * (1 + self.length_margin) - emitted))
