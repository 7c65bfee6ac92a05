"""The port that every predictor fills, and what it is asked with. No predictor lives here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from laps_sd_vllm._core.scheduler_service.core.beliefs import Expected

Features = Mapping[str, float]  # of one request, known at its submission: a name and its value, absent ones 0


@dataclass(frozen=True, slots=True)
class Status:
    """`warm`: it answers. `version`: models fitted so far. `finished`: requests seen; `trained_on`: of the model."""

    warm: bool
    version: int
    finished: int
    trained_on: int

    @property
    def word(self) -> str:
        return "warm" if self.warm else "cold"


class Predictor(Protocol):
    """Deterministic: equal observations, and refits at equal points, give equal predictions."""

    @property
    def status(self) -> Status: ...

    @property
    def due(self) -> bool:
        """Whether enough requests finished since the last refit for another to pay."""

    def predict(self, features: Features) -> Expected | None:
        """None while it is cold."""

    def observe(self, features: Features, tokens: int, drafted: int, accepted: int, *, cut: bool = False) -> None:
        """A request finished: its output tokens and its drafts. `cut`: at its bound."""

    def refit(self) -> None:
        """Learn from what was observed. Takes up to seconds of processor time."""
