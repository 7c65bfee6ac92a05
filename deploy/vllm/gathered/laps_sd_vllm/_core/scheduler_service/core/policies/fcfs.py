"""First come, first served; what serving systems do today. Nothing is preempted."""

from dataclasses import dataclass
from typing import ClassVar

from laps_sd_vllm._core.scheduler_service.core.policies.base import Claim, Policy
from laps_sd_vllm._core.scheduler_service.core.types import View


@dataclass(frozen=True, slots=True)
class Fcfs(Policy):
    preemptive: ClassVar[bool] = False
    asks: ClassVar[bool] = False

    def claim(self, view: View, round_s: float) -> Claim:
        return Claim(1, 0, view.request.arrival)
