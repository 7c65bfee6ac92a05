"""LAPS-SD: least attained service while acceptance still moves, shortest estimated time once it is stable.

Source: Li, Chen, Li, "Semi-Clairvoyant Scheduling of Speculative Decoding Requests to Minimize LLM Inference Latency",
arXiv 2505.17074, Algorithm 1 and the estimate of its section on execution time. What the paper leaves open is a setting
here, and its default our reading. Departures: the estimate includes the request's own prefill, and service is counted
in nominal seconds, so that it depends neither on neighbours nor on the machine's mood.
"""

from dataclasses import dataclass
from typing import ClassVar

from scheduler_service.core.beliefs import MAX_WINDOW
from scheduler_service.core.policies.base import Claim, Policy, check_overtaking
from scheduler_service.core.types import View


@dataclass(frozen=True, slots=True)
class LapsSd(Policy):
    """Queue k of `queues` holds [q0 * 2^(k-2), q0 * 2^(k-1)) nominal seconds, the first from 0, the last unbounded;
    q0 is the cost of `first_queue_rounds` rounds."""

    preemptive: ClassVar[bool] = True
    perceptive: ClassVar[bool] = True

    queues: int = 6
    first_queue_rounds: int = 10
    window: int = 8  # rounds over which the running mean acceptance must hold still
    epsilon: float = 0.05  # by how much it may move and still be stable
    length_margin: float = 0.1  # an overrun prediction becomes emitted * (1 + margin)
    key: str = "total"  # or "remaining": what of the estimate orders a queue
    destination: str = "estimate"  # or "remaining" (of it), or "stay": the queue that a perceptible request goes to
    overtaking: int = 0  # how many times the work ahead of a request is served before it at most; 0: no bound

    def __post_init__(self) -> None:
        if not 1 <= self.queues <= 16:
            raise ValueError("policy-set: queues must be from 1 to 16")
        if self.first_queue_rounds < 1:
            raise ValueError("policy-set: first_queue_rounds must be at least 1")
        if not 1 <= self.window <= MAX_WINDOW:
            raise ValueError(f"policy-set: window must be from 1 to {MAX_WINDOW}")
        if not 0 <= self.epsilon <= 1:
            raise ValueError("policy-set: epsilon must be from 0 to 1")
        if not 0 <= self.length_margin <= 10:
            raise ValueError("policy-set: length_margin must be from 0 to 10")
        if self.key not in ("total", "remaining"):
            raise ValueError("policy-set: key must be total or remaining")
        if self.destination not in ("estimate", "remaining", "stay"):
            raise ValueError("policy-set: destination must be estimate, remaining or stay")

        check_overtaking(self.overtaking)

    @property
    def levels(self) -> int:
        return self.queues

    @property
    def overtaking_bound(self) -> int:
        return self.overtaking

    def perceives(self, view: View) -> bool:
        return view.acceptance.stable(self.window, self.epsilon)

    def claim(self, view: View, round_s: float) -> Claim:
        if not view.perceptible:
            return Claim(self._level(view.attained_s, round_s), 1, view.request.arrival)
        total_s = self._estimate(view, round_s)
        remaining_s = max(0.0, total_s - view.attained_s)
        placed_by = {"estimate": total_s, "remaining": remaining_s, "stay": view.attained_s}[self.destination]
        return Claim(self._level(placed_by, round_s), 0, total_s if self.key == "total" else remaining_s)

    def _estimate(self, view: View, round_s: float) -> float:
        """T = L / (n A + 1) rounds of n T_SSM + T_LLM seconds each (LAPS-SD), and the prompt's prefill. n A is what was
        accepted a round, since a drafter may propose fewer than n."""
        tokens = max(view.predicted_tokens, view.emitted * (1 + self.length_margin))
        return tokens / (view.acceptance.per_round() + 1) * round_s + view.prefill_s

    def _level(self, service_s: float, round_s: float) -> int:
        level, bound = 1, self.first_queue_rounds * round_s
        while service_s >= bound and level < self.queues:
            level, bound = level + 1, bound * 2
        return level
