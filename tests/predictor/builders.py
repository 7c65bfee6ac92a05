"""Streams of made-up requests, and a predictor that is asked before it is told."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from scheduler_service.predictor.features import of_category, of_prompt
from scheduler_service.predictor.model import NORMAL_90, Calibration
from scheduler_service.predictor.online import OnlinePredictor
from scheduler_service.predictor.port import Features
from scheduler_service.predictor.window import hashed

KINDS = {"short": (3.0, 0.2), "middle": (5.0, 0.6), "long": (6.0, 1.2)}  # location and spread of ln(tokens)


def by_kind(rng: Random, kind: str) -> float:
    return rng.gauss(*KINDS[kind])


def all_alike(rng: Random, kind: str) -> float:
    return rng.gauss(5, 0.9)


def skewed(rng: Random, kind: str) -> float:
    return 4 + rng.expovariate(1)


def no_prompt(rng: Random, kind: str, most: int) -> Features:
    return of_category(kind, max(1, round(rng.expovariate(0.01))), 2)


def some_prompt(rng: Random, kind: str, most: int) -> Features:
    """Thirty of a thousand words, and one that tells the kind: hundreds of features, as live."""
    words = [len(KINDS) + rng.randrange(1000) for _ in range(30)]
    return of_prompt([list(KINDS).index(kind), *words], most, 2)


Draw = Callable[[Random, str], float]
Ask = Callable[[Random, str, int], Features]


@dataclass
class Stream:
    """Requests of three kinds; `draw` gives ln(tokens) of one, which one of `bounds` may cut. `hits`: whether each fell
    into its 80 % interval, uncut."""

    seed: int
    bounds: Sequence[int] = (1_000_000,)
    ask: Ask = no_prompt
    predictor: OnlinePredictor = field(default_factory=OnlinePredictor)
    hits: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng, self._bound = Random(self.seed), Random(self.seed)

    def run(self, requests: int, draw: Draw, acceptance: Callable[[str], float] = lambda kind: 0.6) -> "Stream":
        for _ in range(requests):
            kind, most = self.rng.choice(list(KINDS)), self._bound.choice(self.bounds)
            features = self.ask(self.rng, kind, most)
            tokens = max(1, round(math.exp(draw(self.rng, kind))))
            if (model := self.predictor.model) is not None:
                # Also where the predictor holds its tongue, its interval has to be right.
                length = Calibration(self.predictor.surprises).length(*model.raw(hashed(features))[:2])
                self.hits.append(abs(math.log(tokens) - length.location) <= NORMAL_90 * length.spread)
            accepted = sum(self.rng.random() < acceptance(kind) for _ in range(40))
            self.predictor.observe(features, min(tokens, most), 40, accepted, cut=tokens > most)
            if self.predictor.due:
                self.predictor.refit()
        return self

    def coverage(self, last: int) -> float:
        return sum(self.hits[-last:]) / len(self.hits[-last:])
