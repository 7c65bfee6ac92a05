"""Policies as people write them, each with a mistake."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from scheduler_service.core.policies import Claim, Policy
from scheduler_service.core.types import View


@dataclass(frozen=True, slots=True)
class NoDefault(Policy):
    patience_s: float


@dataclass(frozen=True, slots=True)
class Refuses(Policy):
    def __post_init__(self) -> None:
        raise ZeroDivisionError


@dataclass(frozen=True, slots=True)
class Fails(Policy):
    """By the length of the prompt."""

    preemptive: ClassVar[bool] = True
    perceptive: ClassVar[bool] = True
    further: int = 0

    def claim(self, view: View, round_s: float) -> Any:
        made = {
            1: 1.0,
            2: Claim(1, 0, float("nan")),
            3: Claim(1, "first", 0.0),  # type: ignore[arg-type]
            5: Claim(2, 0, 0.0),
            6: Claim(1, 0.5, 0.0),  # type: ignore[arg-type]
        }
        return made[view.request.prompt_tokens] if view.request.prompt_tokens < 9 else Claim(1, 0, 9.0 + self.further)

    def perceives(self, view: View) -> bool:
        return bool(view.request.prompt_tokens / 0)


@dataclass(frozen=True, slots=True)
class NoLevels(Policy):
    preemptive: ClassVar[bool] = False

    @property
    def levels(self) -> int:
        return 1 // 0


@dataclass(frozen=True, slots=True)
class Halves(Policy):
    """Checks its settings, and changes one."""

    preemptive: ClassVar[bool] = False
    further_s: float = 2.0
    known: tuple[str, ...] = ()
    seen: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        object.__setattr__(self, "further_s", self.further_s / 2)


@dataclass(frozen=True, slots=True)
class TooManyLevels(Policy):
    preemptive: ClassVar[bool] = False

    @property
    def levels(self) -> int:
        return 17


@dataclass(frozen=True, slots=True)
class Final(Policy):
    """Lets nobody derive from it."""

    preemptive: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        raise TypeError("final")


@dataclass(frozen=True, slots=True)
class ByNumpy(Policy):
    """Its numbers are numpy's."""

    preemptive: ClassVar[bool] = True

    @property
    def levels(self) -> int:
        return 4

    def claim(self, view: View, round_s: float) -> Any:
        tokens = view.request.prompt_tokens
        return Claim(np.digitize(tokens, [0, 9]), np.int64(tokens), np.log(np.float64(tokens)))


@dataclass(frozen=True, slots=True)
class NotPreemptiveNorOtherwise(Policy):
    """Does not say whether it pauses requests."""


@dataclass(frozen=True, slots=True)
class NeverSure(Policy):
    preemptive: ClassVar[bool] = False

    @property
    def surest(self) -> float:
        return 1 / 0
