"""The worth of a request that has emitted nothing: a Gittins index in two stages. It orders nothing itself.

A request pays w with its first token and 1 with its end. The index is the best rate of pay that it can promise, over
all times to stop: after its first round, or at an output of z tokens,
`(w + P(S <= z)) / (prefill + E[min(S, z)])`; never stopping pays w + 1. Serving the highest index first minimises the
mean of latency + w * time to first token where the Gittins index minimises that of latency (Gittins, Glazebrook, Weber,
"Multi-armed bandit allocation indices", 2011). From the first token on the index is the plain one. Here, as there, the
inverse is told, in the work of tokens: lower goes first.

The index knows neither that an opened stream holds KV nor that it then pauses. Both grow with the queue. So where a
newcomer finds too many requests (`most_open`), or less than half of the memory free (core/fleet.py), its first token is
worth nothing.
"""

import math
from bisect import bisect_right
from functools import lru_cache
from typing import NamedTuple

from scheduler_service.core.beliefs import Length, upper

OPENINGS = {"mean": 0.0, "balanced": 0.2, "first-token": 1.0}
MOST = 1000.0  # so much more than an end a first token may be worth
AGES = 96  # times to stop that are compared
REACH = 4.0  # in spreads to both sides of the median


@lru_cache(maxsize=256)
def worth(opening: str) -> float:
    """Of a first token, beside an end. Raises ValueError."""
    try:
        value = OPENINGS[opening] if opening in OPENINGS else float(opening)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MOST:
        raise ValueError(f"policy-set: opening must be {', '.join(OPENINGS)}, or a number from 0 to {MOST:g}")
    return value


def opening_tokens(length: Length, remaining: float, before: float, first: float, worth: float) -> float:
    """The least work per pay, in tokens. `remaining`: output expected up to the bound on it. `before`: work before the
    first round, in tokens. `first`: tokens of the first round. `worth`: of a first token, above 0."""
    median = math.exp(length.location)
    stops = _stops(round(max(0.05, min(3.0, length.spread)) * 20), worth)
    stop = stops[bisect_right(stops, before / median, key=_from) - 1]
    early = worth + 1 - upper((math.log(first) - length.location) / length.spread)
    best = min((before + first) / early, (before + remaining) / (worth + 1))
    return min(best, stop.work * median + stop.slope * before) if stop.age * median > first else best


class Stop(NamedTuple):
    """Work per pay if one stops at `age`, in medians: `work + slope * before`. It is the best of all for any `before`
    from `start` on."""

    start: float
    age: float
    work: float
    slope: float


def _from(stop: Stop) -> float:
    return stop.start


@lru_cache(maxsize=256)
def _stops(twentieths: int, worth: float) -> tuple[Stop, ...]:
    """The lower envelope of these lines, for a spread in twentieths: the longer the prompt, the later one stops."""
    spread = twentieths / 20
    logs = [spread * REACH * (2 * cell / AGES - 1) for cell in range(AGES + 1)]
    mean = math.exp(spread**2 / 2)
    hull: list[Stop] = []
    for log in logs:
        alive = upper(log / spread)
        work = mean * (1 - upper(log / spread - spread)) + math.exp(log) * alive  # E[min(S, age)]
        pay = worth + 1 - alive
        line = Stop(0.0, math.exp(log), work / pay, 1 / pay)
        while hull and (start := _crossing(hull[-1], line)) <= hull[-1].start:
            hull.pop()
        if not hull or start < math.inf:
            hull.append(line._replace(start=start if hull else 0.0))
    return tuple(hull)


def _crossing(before: Stop, after: Stop) -> float:
    """From which work before the first round on `after`, which is no steeper, is the better of the two."""
    more, flatter = after.work - before.work, before.slope - after.slope
    return more / flatter if flatter > 0 else math.copysign(math.inf, more)
