"""Beliefs about a request: its acceptance rate and its output length. Decisions that follow live elsewhere."""

import math
from dataclasses import dataclass, field

from scheduler_service.core.value import value

MAX_WINDOW = 32  # rounds of history kept for the stability test
FAR = 4.0  # spreads above the median: of what lies beyond little is known
USUAL_TOKENS = 256  # of output, before anything is known
FARTHEST = 20.0  # of ln(tokens), either way: a line through hints that lie close together leads anywhere, and overflows
LONG = 1 << 17  # rounds, after which older ones begin to count half: drafters and draft lengths change
ROOT_2 = math.sqrt(2)


@value
class Acceptance:
    """What one request's rounds of decoding showed. `means` are kept for a policy that asks whether it is `stable`."""

    rounds: int = 0
    drafted: int = 0  # tokens
    accepted: int = 0
    rejected: int = 0  # rounds in which the target disagreed with a draft
    means: tuple[float, ...] = ()  # the running mean after each of the last MAX_WINDOW rounds

    @property
    def mean(self) -> float:
        """Accepted / drafted, in [0, 1]; 0 before anything was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def after(self, drafted: int, accepted: int, new: int, *, keep_means: bool = True) -> "Acceptance":
        """The belief after one more round, which emitted `new` tokens. A round without drafts is no sample, yet counts
        as a round. Where the target disagreed with a draft it has put a token of its own; else the output's end has cut
        the drafts."""
        total, hits = self.drafted + drafted, self.accepted + accepted
        rejected = self.rejected + (accepted < drafted and new > accepted)
        means = (*self.means, hits / total if total else 0.0)[-MAX_WINDOW:] if keep_means else self.means
        return Acceptance(self.rounds + 1, total, hits, rejected, means)

    @property
    def keeps_means(self) -> bool:
        return bool(self.means) or not self.rounds

    def per_round(self, prior: float = 0.0, weight: float = 0.0) -> float:
        """Accepted tokens a round, whatever was drafted: as if `weight` more rounds had shown `prior`."""
        rounds = self.rounds + weight
        return (self.accepted + weight * prior) / rounds if rounds else prior

    def chance(self, prior: float, weight: float = 16.0) -> float:
        """That one draft token is accepted, after accepted ones: as if `weight` drafts had shown `prior`.

        A round is a run of successes that ends with a rejection or is cut at its draft length, so this is the maximum
        likelihood whatever the lengths were; the mean, accepted / drafted, falls as they grow.
        """
        return (self.accepted + weight * prior) / (self.accepted + self.rejected + weight)

    def stable(self, window: int, epsilon: float) -> bool:
        """Whether the running mean moved by at most `epsilon` over the last `window` rounds (LAPS-SD, Algorithm 1)."""
        recent = self.means[-window:]
        return len(recent) == window and max(recent) - min(recent) <= epsilon


@dataclass(slots=True)
class FleetAcceptance:
    """Acceptance before a request showed its own: that of the finished ones."""

    rounds: int
    drafted: int
    accepted: int
    rejected: int

    @classmethod
    def at(cls, draft_len: int) -> "FleetAcceptance":
        """As it begins: half is accepted, with little weight."""
        return cls(rounds=16, drafted=16 * draft_len, accepted=8 * draft_len, rejected=16)

    def observe(self, acceptance: Acceptance) -> None:
        self.rounds += acceptance.rounds
        self.drafted += acceptance.drafted
        self.accepted += acceptance.accepted
        self.rejected += acceptance.rejected
        if self.rounds >= LONG:
            self.rounds, self.drafted = self.rounds // 2, self.drafted // 2
            self.accepted, self.rejected = self.accepted // 2, self.rejected // 2

    @property
    def per_round(self) -> float:
        """Accepted tokens a round."""
        return self.accepted / self.rounds

    @property
    def drafts_per_round(self) -> float:
        return self.drafted / self.rounds

    @property
    def chance(self) -> float:
        """That one draft token is accepted, after accepted ones. A half once none was drafted for very long, as at the
        beginning."""
        tried = self.accepted + self.rejected
        return self.accepted / tried if tried else 0.5


@dataclass(frozen=True, slots=True)
class Length:
    """Output tokens of one request, were there no bound on them. Log-normal: ln(tokens) has mean `location` and
    standard deviation `spread`."""

    location: float
    spread: float

    def at_least(self, spread: float) -> "Length":
        """As if it were no surer than that."""
        return self if self.spread >= spread else Length(self.location, spread)

    def age(self, tokens: int) -> float:
        """In spreads after the median."""
        return (math.log(tokens) - self.location) / self.spread if tokens else -math.inf


class Forecast:
    """What remains of an output that has such a `length` and is cut off at `most` tokens."""

    __slots__ = ("_beyond", "_cut", "_location", "_mean", "_most", "_spread")

    def __init__(self, length: Length, most: int) -> None:
        bound = length.age(most)
        self._location, self._spread, self._most = length.location, length.spread, most
        self._mean = math.exp(length.location + length.spread**2 / 2)
        self._beyond = upper(bound - length.spread)  # the share of `_mean` that outputs beyond the bound have
        self._cut = most * upper(bound)

    def remaining(self, emitted: int) -> float:
        """Expected tokens still to come of a request that did not end by `emitted`. Asked for every row of a report, so
        `Length.age` and `upper` are written out here."""
        most, spread = self._most, self._spread
        if emitted >= most:
            return 0.0
        age = (math.log(emitted) - self._location) / spread if emitted else -math.inf
        if age > FAR:
            return min(spread / FAR * emitted, most - emitted)
        between = self._mean * (math.erfc((age - spread) / ROOT_2) / 2 - self._beyond)  # of those that end on the way
        expected = (between + self._cut) / (math.erfc(age / ROOT_2) / 2) - emitted
        rest = most - emitted
        return expected if expected < rest else rest


def upper(x: float) -> float:
    """P(Z > x) of a standard normal."""
    return math.erfc(x / ROOT_2) / 2


@dataclass(frozen=True, slots=True)
class Expected:
    """What a predictor said of a request at its submission; None where it knows no better than the fleet's mean.
    `acceptance`: accepted / drafted of such requests."""

    length: Length | None = None
    acceptance: float | None = None


SOME_LENGTH = Length(math.log(USUAL_TOKENS), 1.2)  # before anything is known


@dataclass(slots=True)
class Trust:
    """How far predictions can be trusted: a line from ln(predicted) to ln(true) and the spread around it.

    Bayesian linear regression on finished requests, the old ones fading. It begins as slope 1, offset 0, as if
    `weight` requests had shown that; predictions that turn out as noise end at slope 0, where only the mean of all
    lengths is believed.
    """

    weight: float = 4.0
    slope_weight: float = 2.0  # in squared deviations of ln(predicted)
    prior_spread: float = 0.7
    fading: float = 1 - 1 / 2048  # of what is known, per finished request
    n: float = 0.0
    x: float = 0.0  # means, of ln(predicted) and ln(true)
    y: float = 0.0
    xx: float = 0.0  # sums of squared deviations from the means
    xy: float = 0.0
    yy: float = 0.0

    def observe(self, predicted: int, true: int, *, cut: bool = False) -> None:
        """Welford's update of means and squared deviations. `cut`: it would have been longer, and counts as what is now
        believed of the longer ones (a step of expectation-maximisation: Tobin's censored regression)."""
        x, y, unsure = math.log(predicted), math.log(true), 0.0
        if cut:
            known = self.belief(predicted)
            z = min((y - known.location) / known.spread, FAR)
            hazard = math.exp(-z * z / 2) / math.sqrt(2 * math.pi) / upper(z)
            y = max(y, known.location + known.spread * hazard)
            unsure = known.spread**2 * max(0.0, 1 + z * hazard - hazard**2)
        self.n = self.n * self.fading + 1
        dx, dy = x - self.x, y - self.y
        self.x += dx / self.n
        self.y += dy / self.n
        self.xx = self.xx * self.fading + dx * (x - self.x)
        self.xy = self.xy * self.fading + dx * (y - self.y)
        self.yy = self.yy * self.fading + dy * (y - self.y) + unsure

    def belief(self, predicted: int) -> Length:
        x = math.log(predicted)
        slope = (self.xy + self.slope_weight) / (self.xx + self.slope_weight)
        # With nothing seen the line passes through (x, x); then it moves to the mean of what was seen.
        seen = self.n / (self.n + self.weight)
        location = min(max(x + seen * (self.y + slope * (x - self.x) - x), -FARTHEST), FARTHEST)
        residual = max(0.0, self.yy - 2 * slope * self.xy + slope**2 * self.xx)
        prior = 2 * self.weight
        return Length(location, math.sqrt((prior * self.prior_spread**2 + residual) / (prior + self.n)))


@dataclass(slots=True)
class FleetLength:
    """What finished requests teach about the length of the others."""

    finished: int = 0
    tokens: int = 0
    hinted: Trust = field(default_factory=Trust)
    unhinted: Trust = field(default_factory=lambda: Trust(prior_spread=SOME_LENGTH.spread))

    def observe(self, tokens: int, hint: int | None = None, *, cut: bool = False) -> None:
        """Of one that ended with so many; `cut`: at its bound."""
        self.finished += 1
        self.tokens += tokens
        if tokens:
            self.unhinted.observe(USUAL_TOKENS, tokens, cut=cut)
            if hint is not None:
                self.hinted.observe(max(1, hint), tokens, cut=cut)

    def predict(self, hint: int | None, max_tokens: int, expected: Expected | None = None) -> int:
        """A client's hint, else the expected median, else the mean of finished requests, else max_tokens; always in
        [1, max_tokens]."""
        guess: float = max_tokens
        if hint is not None:
            guess = hint
        elif expected is not None and expected.length is not None:
            guess = math.exp(expected.length.location)
        elif self.finished:
            guess = self.tokens / self.finished
        return max(1, min(round(guess), max_tokens))

    def belief(self, hint: int | None, expected: Expected | None = None) -> Length:
        """A client's hint as far as hints are to be trusted, else what is expected, else the lengths of finished
        requests."""
        if hint is not None:
            return self.hinted.belief(max(1, hint))
        known = expected.length if expected is not None else None
        return known or self.unhinted.belief(USUAL_TOKENS)
