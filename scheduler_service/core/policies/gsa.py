"""Geometric slicing: lengths unknown, phases of doubling output budgets, first come first served within a phase.

Source: "Competitive Non-Clairvoyant KV-Cache Scheduling for LLM Inference", arXiv 2601.22996 (GSA). Departures: a
phase's end preempts rather than restarts (KV is kept while the core's budget lasts, and recomputed once dropped), and
starts are not staggered for KV ramps to tile the budget, since the core fits KV itself.
"""

from dataclasses import dataclass
from typing import ClassVar

from scheduler_service.core.policies.base import Claim, Policy
from scheduler_service.core.types import View


@dataclass(frozen=True, slots=True)
class Gsa(Policy):
    """Phase k ends at `first_phase_tokens` * 2^(k-1) output tokens; the last of `phases` has no end."""

    preemptive: ClassVar[bool] = True
    asks: ClassVar[bool] = False

    phases: int = 16
    first_phase_tokens: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.phases <= 16:
            raise ValueError("policy-set: phases must be from 1 to 16")
        if self.first_phase_tokens < 1:
            raise ValueError("policy-set: first_phase_tokens must be at least 1")

    @property
    def levels(self) -> int:
        return self.phases

    def claim(self, view: View, round_s: float) -> Claim:
        return self.worst(view, round_s, 0, 0)

    def worst(self, view: View, round_s: float, rounds: int, tokens: int) -> Claim:
        phase = 1 + ((view.emitted + tokens) // self.first_phase_tokens).bit_length()
        return Claim(min(phase, self.phases), 0, view.request.arrival)
