"""What a worker's probe reads of the output that remains, and how far that is believed. Requests live elsewhere.

A reading stands beside what was believed before it, which features of the request or its client's hint have told. A
line from both to ln(true), learned from finished requests, makes one belief of the two. Until it has shown that it
foretells better than the former belief alone, readings change nothing.
"""

import math
from dataclasses import dataclass, field
from statistics import NormalDist

from scheduler_service.core.beliefs import FAR, FARTHEST, Length, upper
from scheduler_service.core.value import value

BINS = 12  # bin k of a reading: from 2**k tokens to 2**(k + 1)
WIDTH = math.log(2)  # of a bin, in ln(tokens)
NORMAL = NormalDist()
MOST_KEPT = 16  # readings of one request that are learned from at its end; the later ones are much alike
PROOF = 3.0  # nats, by which finished requests must have been foretold better: 20 to 1
MOST_GAIN = 30.0  # nats that are remembered, so that readings which turn bad are soon left out
FIRST = 1  # tokens of output at the first reading: those of a prefill


@value
class Reading:
    """After `after` tokens of output: ln(tokens that remain) has mean `location`, as the probe says."""

    after: int
    location: float


def reading(after: int, chances: bytes) -> Reading:
    """Of a byte q for each bin, whose weight is exp(-q / 16). Raises ValueError."""
    if len(chances) != BINS or after < 1:
        raise ValueError(f"a reading of {len(chances)} bins after {after} tokens; {BINS}, and at least 1, are right")
    weights = [math.exp(-q / 16) for q in chances]
    middle = sum(weight * (k + 0.5) for k, weight in enumerate(weights)) / sum(weights)
    return Reading(after, WIDTH * middle)


@dataclass(slots=True)
class Line:
    """Bayesian regression of ln(true) on two guesses of it, the old requests fading. It begins as if the first guess
    were right, with a spread of `prior_spread`, and the second one noise."""

    prior_spread: float = 1.0
    weight: float = 4.0  # requests, that the beginning counts for
    fading: float = 1 - 1 / 1024
    n: float = 0.0
    means: list[float] = field(default_factory=lambda: [0.0] * 3)  # of both guesses and of ln(true)
    products: list[float] = field(default_factory=lambda: [0.0] * 6)  # of deviations: pp, pq, qq, py, qy, yy

    def observe(self, p: float, q: float, y: float, share: float, unsure: float = 0.0) -> None:
        """Of a request that counts as `share` of one. `unsure`: variance of `y`, where that is a guess itself."""
        faded = self.fading**share
        self.n = self.n * faded + share
        old = p - self.means[0], q - self.means[1], y - self.means[2]
        self.means = [mean + share / self.n * each for mean, each in zip(self.means, old, strict=True)]
        new = p - self.means[0], q - self.means[1], y - self.means[2]
        pairs = ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 2))
        self.products = [
            kept * faded + share * old[i] * new[j] for kept, (i, j) in zip(self.products, pairs, strict=True)
        ]
        self.products[5] += share * unsure

    def belief(self, p: float, q: float) -> Length:
        pp, pq, qq, py, qy, yy = self.products
        a, c = pp + self.weight, qq + self.weight
        determinant = a * c - pq * pq
        of_p = (c * (py + self.weight) - pq * qy) / determinant
        of_q = (a * qy - pq * (py + self.weight)) / determinant
        seen = self.n / (self.n + self.weight)
        mean_p, mean_q, mean_y = self.means
        fitted = mean_y + of_p * (p - mean_p) + of_q * (q - mean_q)
        location = p + seen * (fitted - p)
        left = yy - 2 * (of_p * py + of_q * qy) + of_p * of_p * pp + 2 * of_p * of_q * pq + of_q * of_q * qq
        spread = math.sqrt((self.weight * self.prior_spread**2 + max(0.0, left)) / (self.weight + self.n))
        return Length(min(max(0.0, location), FARTHEST), max(0.1, spread))


@dataclass(slots=True)
class Kept:
    """A reading, until its request has ended and shows what was true: both guesses of ln(tokens that remain)."""

    after: int
    former: float
    read: float


@dataclass(slots=True)
class Stage:
    """Readings of one kind. `alone` knows the former belief only; `both` is better than it by `gain` nats."""

    alone: Line = field(default_factory=Line)
    both: Line = field(default_factory=Line)
    gain: float = 0.0

    def observe(self, former: float, read: float, true: float, share: float, *, cut: bool) -> None:
        """`cut`: more would have come (a step of expectation-maximisation, as in `Trust`)."""
        told, untold = self.both.belief(former, read), self.alone.belief(former, 0.0)
        gain = _likelihood(told, true, cut=cut) - _likelihood(untold, true, cut=cut)
        self.gain = min(self.gain * self.both.fading**share + share * gain, MOST_GAIN)
        y, unsure = _beyond(told, true) if cut else (true, 0.0)
        self.both.observe(former, read, y, share, unsure)
        y, unsure = _beyond(untold, true) if cut else (true, 0.0)
        self.alone.observe(former, 0.0, y, share, unsure)


@dataclass(slots=True)
class FleetProbe:
    """What finished requests teach about readings: those at the first token, and the later ones."""

    stages: list[Stage] = field(default_factory=lambda: [Stage(), Stage()])

    def belief(self, kept: Kept) -> Length | None:
        """Of the tokens that remain after the reading. None: the former belief stands, for readings do not pay yet."""
        stage = self._stage(kept)
        return stage.both.belief(kept.former, kept.read) if stage.gain > PROOF else None

    def observe(self, readings: list[Kept], tokens: int, *, cut: bool) -> None:
        """A request ended with so many. One after the other its readings count as one, at either stage."""
        later = sum(self._stage(kept) is not self.stages[0] for kept in readings)
        for kept in readings:
            stage = self._stage(kept)
            if tokens > kept.after:
                share = 1.0 if stage is self.stages[0] else 1 / later
                stage.observe(kept.former, kept.read, math.log(tokens - kept.after), share, cut=cut)

    def _stage(self, kept: Kept) -> Stage:
        return self.stages[0 if kept.after <= FIRST else 1]


def former(length: Length, after: int) -> float:
    """Median of ln(tokens that remain) after the first `after` of an output of this `length`."""
    age = length.age(after)
    if age >= FAR:
        return math.log(max(1.0, after * length.spread / FAR))
    middle = NORMAL.inv_cdf(1 - upper(age) / 2)
    return math.log(max(1.0, math.exp(length.location + length.spread * middle) - after))


def _likelihood(belief: Length, true: float, *, cut: bool) -> float:
    z = max(-FAR, min((true - belief.location) / belief.spread, FAR))
    return math.log(upper(z)) if cut else -math.log(belief.spread) - (z * z + math.log(2 * math.pi)) / 2


def _beyond(belief: Length, cut: float) -> tuple[float, float]:
    """Mean and variance of what is larger than `cut`, by this belief."""
    z = min((cut - belief.location) / belief.spread, FAR)
    hazard = math.exp(-z * z / 2) / math.sqrt(2 * math.pi) / upper(z)
    mean = belief.location + belief.spread * hazard
    return max(cut, mean), belief.spread**2 * max(0.0, 1 + z * hazard - hazard**2)
