"""Streams of made-up requests, and a predictor that is asked before it is told."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from scheduler_service.predictor.features import of_category
from scheduler_service.predictor.model import NORMAL_90, Calibration
from scheduler_service.predictor.online import OnlinePredictor
from scheduler_service.predictor.window import hashed

KINDS = {"short": (3.0, 0.2), "middle": (5.0, 0.6), "long": (6.0, 1.2)}  # location and spread of ln(tokens)


def by_kind(rng: Random, kind: str) -> float:
    return rng.gauss(*KINDS[kind])


def all_alike(rng: Random, kind: str) -> float:
    return rng.gauss(5, 0.9)


def skewed(rng: Random, kind: str) -> float:
    return 4 + rng.expovariate(1)


Draw = Callable[[Random, str], float]


@dataclass
class Stream:
    """Requests of three kinds; `draw` gives ln(tokens) of one. `hits`: whether each fell into its 80 % interval."""

    seed: int
    predictor: OnlinePredictor = field(default_factory=OnlinePredictor)
    hits: list[bool] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)

    def run(self, requests: int, draw: Draw, acceptance: Callable[[str], float] = lambda kind: 0.6) -> "Stream":
        for _ in range(requests):
            kind, prompt = self.rng.choice(list(KINDS)), max(1, round(self.rng.expovariate(0.01)))
            features = of_category(kind, prompt, 2)
            tokens = max(1, round(math.exp(draw(self.rng, kind))))
            if (model := self.predictor.model) is not None:
                # Also where the predictor holds its tongue, its interval has to be right.
                length = Calibration(self.predictor.surprises).length(*model.raw(hashed(features))[:2])
                self.hits.append(abs(math.log(tokens) - length.location) <= NORMAL_90 * length.spread)
            accepted = sum(self.rng.random() < acceptance(kind) for _ in range(40))
            self.predictor.observe(features, tokens, 40, accepted)
            if self.predictor.due:
                self.predictor.refit()
        return self

    def coverage(self, last: int) -> float:
        return sum(self.hits[-last:]) / len(self.hits[-last:])
