"""Skip-join multi-level feedback queue: enter where the quantum covers the prefill, sink as quanta are used up.

Source: Wu et al., "Fast Distributed Inference Serving for Large Language Models" (FastServe), arXiv 2305.05920.
Departures: no promotion of the starved (a claim changes only when its request is served, and FastServe promotes by
time), and KV is offloaded or dropped by the core's budget, not ahead of need.
"""

from dataclasses import dataclass
from typing import ClassVar

from scheduler_service.core.policies.base import SURELY, Claim, Policy
from scheduler_service.core.types import View


@dataclass(frozen=True, slots=True)
class Mlfq(Policy):
    """The quantum of queue k is `first_quantum_rounds` rounds * 2^(k-1); the last queue's has no end."""

    preemptive: ClassVar[bool] = True
    asks: ClassVar[bool] = False

    queues: int = 6
    first_quantum_rounds: int = 10

    def __post_init__(self) -> None:
        if not 1 <= self.queues <= 16:
            raise ValueError("policy-set: queues must be from 1 to 16")
        if self.first_quantum_rounds < 1:
            raise ValueError("policy-set: first_quantum_rounds must be at least 1")

    @property
    def levels(self) -> int:
        return self.queues

    def claim(self, view: View, round_s: float) -> Claim:
        return self._claim(view, view.attained_s, round_s)

    def worst(self, view: View, round_s: float, rounds: int, tokens: int) -> Claim | None:
        return self._claim(view, (view.attained_s + rounds * round_s) * SURELY, round_s)

    def _claim(self, view: View, attained_s: float, round_s: float) -> Claim:
        quantum_s = self.first_quantum_rounds * round_s
        level = 1
        while quantum_s < view.prefill_s and level < self.queues:
            level, quantum_s = level + 1, 2 * quantum_s
        rest_s = attained_s
        while rest_s >= quantum_s and level < self.queues:
            rest_s -= quantum_s
            level, quantum_s = level + 1, 2 * quantum_s
        return Claim(level, 0, view.request.arrival)
