"""Least attained service first: the requests that were served least run. Knows nothing of lengths.

Source: Nuyens, Wierman, "The Foreground-Background queue: a survey", Performance Evaluation 65, 2008; Tiresias
(NSDI 2019) is its kin for deep learning jobs. Departure: service is compared in whole quanta of `quantum_rounds`
rounds, and the one that runs keeps its place within a quantum.
"""

from dataclasses import dataclass
from typing import ClassVar

from laps_sd_vllm._core.scheduler_service.core.policies.base import Claim, Policy
from laps_sd_vllm._core.scheduler_service.core.types import View


@dataclass(frozen=True, slots=True)
class Las(Policy):
    preemptive: ClassVar[bool] = True
    asks: ClassVar[bool] = False

    quantum_rounds: int = 1

    def __post_init__(self) -> None:
        if self.quantum_rounds < 1:
            raise ValueError("policy-set: quantum_rounds must be at least 1")

    def claim(self, view: View, round_s: float) -> Claim:
        quantum_s = self.quantum_rounds * round_s
        # Attained service is a sum of floats: one just short of a quantum's edge is at the edge.
        return Claim(1, 0, (view.attained_s / quantum_s + 1e-9) // 1)
