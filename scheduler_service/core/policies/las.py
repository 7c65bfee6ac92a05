"""Least attained service first: the requests that were served least run. Knows nothing of lengths.

Source: Nuyens, Wierman, "The Foreground-Background queue: a survey", Performance Evaluation 65, 2008; Tiresias
(NSDI 2019) is its kin for deep learning jobs. Departure: service is compared in whole quanta of `quantum_rounds`
rounds, and the one that runs keeps its place within a quantum.
"""

from dataclasses import dataclass
from typing import ClassVar

from scheduler_service.core.policies.base import SURELY, Claim, Policy
from scheduler_service.core.types import View


@dataclass(frozen=True, slots=True)
class Las(Policy):
    preemptive: ClassVar[bool] = True
    asks: ClassVar[bool] = False

    quantum_rounds: int = 1

    def __post_init__(self) -> None:
        if self.quantum_rounds < 1:
            raise ValueError("policy-set: quantum_rounds must be at least 1")

    def claim(self, view: View, round_s: float) -> Claim:
        return self._claim(view.attained_s, round_s)

    def worst(self, view: View, round_s: float, rounds: int, tokens: int) -> Claim | None:
        return self._claim((view.attained_s + rounds * round_s) * SURELY, round_s)

    def _claim(self, attained_s: float, round_s: float) -> Claim:
        # Attained service is a sum of floats: one just short of a quantum's edge is at the edge.
        return Claim(1, 0, (attained_s / (self.quantum_rounds * round_s) + 1e-9) // 1)
