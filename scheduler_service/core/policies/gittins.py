"""Gittins index: requests that promise most completions per second run first, by belief about what remains of them.

Sources: Gittins, "Bandit processes and dynamic allocation indices", J. Royal Statistical Society B 41(2), 1979; Scully,
Harchol-Balter, Scheller-Wolf, "SOAP: one clean analysis of all age-based scheduling policies", POMACS 2(1), 2018; on
LLMs SageSched (arXiv 2603.07917) and Hermes (arXiv 2506.14851). What is ours: the length belief is what finished
requests teach about predictions (`core.beliefs.Trust`), the acceptance is shrunk to the expected one from the first
round, so that there is no blind phase, and the way back into the batch is charged. That newcomers are opened early is
LAPS-SD's: its phase of least attained service (arXiv 2505.17074); the index that weighs it is in `opening.py`.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from scheduler_service.core.beliefs import upper
from scheduler_service.core.policies.base import Claim, Policy, check_overtaking, check_pause
from scheduler_service.core.policies.opening import opening_tokens, worth
from scheduler_service.core.types import View

AGES = 96  # cells of a table
REACH = 4.0  # in spreads to both sides of the median


@dataclass(frozen=True, slots=True)
class Gittins(Policy):
    """`acceptance_rounds`: for how many rounds of its own a request's acceptance counts as much as the expected one."""

    preemptive: ClassVar[bool] = True
    learns: ClassVar[bool] = True
    monotone: ClassVar[bool] = True

    acceptance_rounds: float = 16.0
    least_spread: float = 0.2  # no belief about a length is surer than this
    ageing: float = 0.0  # seconds of work that a second of waiting outweighs; 0 is the lowest mean, much is fcfs
    overtaking: int = 20  # how many times the work ahead of a request is served before it at most; 0: no bound
    opening: str = "mean"  # or balanced, first-token, or a number: what a first token is worth, an end being worth 1
    most_open: int = 16  # requests live for each slot, above which a newcomer's first token is worth nothing
    blind: bool = False  # every request's acceptance is taken for that of the finished ones
    max_pause_s: float = 0.0  # for how long a stream that has begun may pause; 0: no bound

    def __post_init__(self) -> None:
        if not 0 < self.acceptance_rounds <= 1e9:
            raise ValueError("policy-set: acceptance_rounds must be over 0")
        if not 0 <= self.ageing <= 1000:
            raise ValueError("policy-set: ageing must be from 0 to 1000")
        check_overtaking(self.overtaking)
        check_pause(self.max_pause_s)
        worth(self.opening)
        if self.most_open < 0:
            raise ValueError("policy-set: most_open must be at least 0")
        if not 0.05 <= self.least_spread <= 3:
            raise ValueError("policy-set: least_spread must be from 0.05 to 3")

    @property
    def overtaking_bound(self) -> int:
        return self.overtaking

    @property
    def pause_bound_s(self) -> float:
        return self.max_pause_s

    @property
    def surest(self) -> float:
        return self.least_spread

    def claim(self, view: View, round_s: float) -> Claim:
        length, emitted = view.length, view.emitted
        age = emitted - view.since
        median = math.exp(length.location)
        # Of a length that is cut at a bound the index is that of the uncut one, or all that is left if that is less.
        tokens = min(median * rank(age / median, length.spread), view.remaining_tokens)
        per_round = 1 + (
            view.usual_accepted
            if self.blind
            else view.acceptance.per_round(view.prior_accepted, self.acceptance_rounds)
        )
        resume_s = view.resume_s
        own_s = round_s - view.hidden_s
        remaining_s = tokens / per_round * own_s + resume_s
        may_open = not view.memory_short and view.live_per_slot <= self.most_open
        if not emitted and may_open and (first_token := worth(self.opening)):
            before = resume_s / own_s * per_round
            tokens = opening_tokens(length, view.remaining_tokens, before, per_round, first_token)
            remaining_s = tokens / per_round * own_s
        # All wait at the same pace: that it arrived early weighs as much, and need not be told anew every second.
        return Claim(1, 0, remaining_s + self.ageing * view.request.arrival)

    def worst(self, view: View, round_s: float, rounds: int, tokens: int) -> Claim | None:
        """As if it had the worst rank of all ages that it may reach, and none of its drafts were accepted."""
        seen, weight = view.acceptance, self.acceptance_rounds
        per_round = (seen.accepted + weight * view.prior_accepted) / (seen.rounds + rounds + weight)
        per_round = 1 + (view.usual_accepted if self.blind else per_round)
        median, age = math.exp(view.length.location), view.emitted - view.since
        if not age:
            return None
        left = median * worst_rank(age / median, (age + tokens) / median, view.length.spread)
        remaining_s = left / per_round * (round_s - view.hidden_s) + view.resume_s
        return Claim(1, 0, remaining_s + self.ageing * view.request.arrival)


def rank(age: float, spread: float) -> float:
    """Least expected work per completion of a log-normal size with median 1 that did not end by `age`; in medians.

    It is constant within a cell of the table: a request that runs, and whose bound is far, meets its rivals anew only
    when it is markedly older.
    """
    return _rank(_table_for(spread), age, spread, _cell(age, spread))


def _cell(age: float, spread: float) -> float:
    return (math.log(age) / spread + REACH) * AGES / (2 * REACH) if age > 0 else 0.0


def _rank(steps: tuple[float, ...], age: float, spread: float, cell: float) -> float:
    if cell < 1:
        return steps[0] - age  # so early none ends: every token is one less to go
    if cell >= AGES:
        return steps[-1] * age / math.exp(REACH * spread)  # so late what is left grows with the age
    return steps[int(cell)]


def worst_rank(youngest: float, oldest: float, spread: float) -> float:
    """The highest rank of all ages from `youngest`, above 0, to `oldest`."""
    steps, young, old = _table_for(spread), _cell(youngest, spread), _cell(oldest, spread)
    first, last = int(max(0.0, min(young, AGES - 1))), int(max(0.0, min(old, AGES - 1)))
    within = steps[first] if first == last else max(steps[first : last + 1])
    return max(_rank(steps, youngest, spread, young), within, _rank(steps, oldest, spread, old))


@lru_cache(maxsize=4096)
def _table_for(spread: float) -> tuple[float, ...]:
    """The table of the nearest spread that has one."""
    return _table(round(max(0.05, min(3.0, spread)) * 20))


@lru_cache(maxsize=64)
def _table(twentieths: int) -> tuple[float, ...]:
    """The ranks at AGES + 1 ages, for a spread in twentieths: min over stops z > age of E[min(S, z) - age] / P(S <= z),
    both given S > age. For a log-normal both have closed forms."""
    spread = twentieths / 20
    logs = [spread * REACH * (2 * cell / AGES - 1) for cell in range(AGES + 1)]
    ages = [0.0, *(math.exp(log) for log in logs[1:])]
    alive = [1.0, *(upper(log / spread) for log in logs[1:])]  # P(S > age)
    beyond = [math.exp(spread**2 / 2)]  # E[S; S > age]
    beyond += [beyond[0] * upper(log / spread - spread) for log in logs[1:]]
    ranks: list[float] = []
    for i, age in enumerate(ages):
        best = beyond[i] / alive[i] - age  # never stop before the end
        for j in range(i + 1, AGES + 1):
            ends = alive[i] - alive[j]
            work = beyond[i] - beyond[j] + ages[j] * alive[j] - age * alive[i]
            best = min(best, work / ends)
        ranks.append(best)
    return tuple(ranks)
