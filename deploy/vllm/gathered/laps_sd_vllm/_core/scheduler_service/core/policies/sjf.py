"""Shortest job first by predicted output length; nothing is preempted.

Source: Qiu et al., "Efficient Interactive LLM Serving with Proxy Model-based Sequence Length Prediction" (SSJF),
arXiv 2404.08509. Departure: the prediction is whatever the predictor port gives, not a proxy model's.
"""

from dataclasses import dataclass
from typing import ClassVar

from laps_sd_vllm._core.scheduler_service.core.policies.base import Claim, Policy
from laps_sd_vllm._core.scheduler_service.core.types import View


@dataclass(frozen=True, slots=True)
class Sjf(Policy):
    preemptive: ClassVar[bool] = False

    def claim(self, view: View, round_s: float) -> Claim:
        return Claim(1, 0, view.predicted_tokens)
