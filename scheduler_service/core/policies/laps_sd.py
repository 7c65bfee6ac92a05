"""LAPS-SD: least attained service while acceptance still moves, shortest estimated time once it is stable.

Source: Li, Chen, Li, "Semi-Clairvoyant Scheduling of Speculative Decoding Requests to Minimize LLM Inference Latency",
arXiv 2505.17074, Algorithm 1 and the estimate of its section on execution time. What the paper leaves open is a setting
here, and its default our reading of its letter. Departures: the estimate includes the request's own prefill, and
service is counted in nominal seconds, so that it depends neither on neighbours nor on the machine's mood.

`reading=adapted` keeps both phases and is ours otherwise. A request is perceptible once the rounds that acceptance
still leaves uncertain in what remains of it are few: at most the share `doubt` of these rounds, or of the first
queue's. So a short answer need not wait for its acceptance to hold still, nor a long one. What remains is estimated
with the acceptance shrunk to the expected one, and orders the queues.
"""

from dataclasses import dataclass
from math import inf, sqrt
from typing import ClassVar

from scheduler_service.core.beliefs import MAX_WINDOW
from scheduler_service.core.policies.base import SURELY, Claim, Policy, check_overtaking, check_pause
from scheduler_service.core.types import View

FIRST_QUEUE = {"paper": 10, "adapted": 20}  # rounds, by reading
ROUND_CV = 0.5  # deviation over mean of the tokens of a round: 0.38 to 0.94 in public logs, by drafter


@dataclass(frozen=True, slots=True)
class LapsSd(Policy):
    """Queue k of `queues` holds [q0 * 2^(k-2), q0 * 2^(k-1)) nominal seconds, the first from 0, the last unbounded;
    q0 is the cost of `first_queue_rounds` rounds; 0: of 10, or of 20 under the adapted reading."""

    preemptive: ClassVar[bool] = True
    perceptive: ClassVar[bool] = True
    monotone: ClassVar[bool] = True

    queues: int = 6
    first_queue_rounds: int = 0
    window: int = 8  # rounds over which the running mean acceptance must hold still
    epsilon: float = 0.05  # by how much it may move and still be stable
    length_margin: float = 0.1  # an overrun prediction becomes emitted * (1 + margin)
    key: str = "total"  # or "remaining": what of the estimate orders a queue
    destination: str = "estimate"  # or "remaining" (of it), or "stay": the queue that a perceptible request goes to
    overtaking: int = 0  # how many times the work ahead of a request is served before it at most; 0: no bound
    max_pause_s: float = 0.0  # for how long a stream that has begun may pause; 0: no bound
    reading: str = "paper"  # or "adapted", for which window, epsilon, key and destination mean nothing
    doubt: float = 0.25  # adapted: the share of an estimate that acceptance may leave uncertain; 1: no test
    expected_rounds: float = 3.0  # adapted: so many rounds of a request's own count as much as the expected acceptance
    blind: bool = False  # every request's acceptance is taken for that of the finished ones

    def __post_init__(self) -> None:
        if not 1 <= self.queues <= 16:
            raise ValueError("policy-set: queues must be from 1 to 16")
        if self.first_queue_rounds < 0:
            raise ValueError("policy-set: first_queue_rounds must be at least 0")
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
        if self.reading not in FIRST_QUEUE:
            raise ValueError("policy-set: reading must be paper or adapted")
        if not 0 <= self.doubt <= 1:
            raise ValueError("policy-set: doubt must be from 0 to 1")
        if not 0 <= self.expected_rounds <= 1e9:
            raise ValueError("policy-set: expected_rounds must be from 0")
        check_pause(self.max_pause_s)
        check_overtaking(self.overtaking)

    @property
    def levels(self) -> int:
        return self.queues

    @property
    def overtaking_bound(self) -> int:
        return self.overtaking

    @property
    def pause_bound_s(self) -> float:
        return self.max_pause_s

    @property
    def _first_queue(self) -> int:
        """Rounds."""
        return self.first_queue_rounds or FIRST_QUEUE[self.reading]

    def perceives(self, view: View) -> bool:
        if self.reading == "adapted":
            rounds = self._remaining_tokens(view) / self._per_round(view)
            return self._uncertain(view) * rounds <= self.doubt * max(rounds, self._first_queue)
        if self.blind:  # what does not move is stable
            return view.acceptance.rounds >= self.window
        return view.acceptance.stable(self.window, self.epsilon)

    def claim(self, view: View, round_s: float) -> Claim:
        if not view.perceptible:
            return Claim(self._level(view.attained_s, round_s), 1, view.request.arrival)
        if self.reading == "adapted":
            own_s = round_s - view.hidden_s
            remaining_s = self._remaining_tokens(view) / self._per_round(view) * own_s + view.resume_s
            return Claim(self._level(remaining_s, round_s), 0, remaining_s)
        total_s = self._estimate(view, round_s)
        remaining_s = max(0.0, total_s - (view.attained_s - view.acceptance.rounds * view.hidden_s))
        placed_by = {"estimate": total_s, "remaining": remaining_s, "stay": view.attained_s}[self.destination]
        return Claim(self._level(placed_by, round_s), 0, total_s if self.key == "total" else remaining_s)

    def worst(self, view: View, round_s: float, rounds: int, tokens: int) -> Claim | None:
        """As if no draft were accepted any more: of what may come of it as it is, and of what if it is perceptible. The
        adapted reading asks for the output after each round whether it is that."""
        adapted, seen, emitted = self.reading == "adapted", view.acceptance, view.emitted + tokens
        if adapted and not view.perceptible:
            return None
        weight = self.expected_rounds if adapted else 0.0
        per_round = (seen.accepted + weight * view.prior_accepted) / (seen.rounds + rounds + weight)
        round_tokens = 1 + (view.usual_accepted if self.blind else per_round)
        own_s = round_s - view.hidden_s
        attained_s = (view.attained_s + rounds * round_s) * SURELY
        if adapted:
            left = max(view.predicted_tokens - view.emitted, self.length_margin * emitted, 1.0)
            key = placed_by = left / round_tokens * own_s + view.resume_s
        else:
            total = max(view.predicted_tokens, emitted * (1 + self.length_margin))
            total_s = total / round_tokens * own_s + view.prefill_s
            remaining_s = max(0.0, total_s - (view.attained_s - seen.rounds * view.hidden_s))
            placed_by = {"estimate": total_s, "remaining": remaining_s, "stay": attained_s}[self.destination]
            key = total_s if self.key == "total" else remaining_s
        perceptible = Claim(self._level(placed_by, round_s), 0, key)
        if view.perceptible:
            return perceptible
        return max(perceptible, Claim(self._level(attained_s, round_s), 1, view.request.arrival))

    def _estimate(self, view: View, round_s: float) -> float:
        """T = L / (n A + 1) rounds of n T_SSM + T_LLM seconds each (LAPS-SD), and the prompt's prefill. n A is what was
        accepted a round, since a drafter may propose fewer than n. T_SSM is drafting that is not hidden behind another
        pass: of drafts made elsewhere, what is waited for them."""
        tokens = max(view.predicted_tokens, view.emitted * (1 + self.length_margin))
        return tokens / self._per_round(view) * (round_s - view.hidden_s) + view.prefill_s

    def _per_round(self, view: View) -> float:
        """Tokens."""
        if self.blind:
            return view.usual_accepted + 1
        if self.reading == "adapted":
            return view.acceptance.per_round(view.prior_accepted, self.expected_rounds) + 1
        return view.acceptance.per_round() + 1

    def _remaining_tokens(self, view: View) -> float:
        return max(view.predicted_tokens - view.emitted, self.length_margin * view.emitted, 1.0)

    def _uncertain(self, view: View) -> float:
        """The share of an estimated time that acceptance leaves uncertain: the standard error of a mean of so many
        rounds."""
        if self.doubt == 1:
            return 0.0
        rounds = view.acceptance.rounds + self.expected_rounds
        return ROUND_CV / sqrt(rounds) if rounds else inf

    def _level(self, service_s: float, round_s: float) -> int:
        level, bound = 1, self._first_queue * round_s
        while service_s >= bound and level < self.queues:
            level, bound = level + 1, bound * 2
        return level
