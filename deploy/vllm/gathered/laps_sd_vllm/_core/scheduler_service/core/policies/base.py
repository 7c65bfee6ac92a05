"""The port that every policy fills. No policy lives here."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from laps_sd_vllm._core.scheduler_service.core.types import View


class Claim(NamedTuple):
    """A request's place in the order, compared field by field, lower first."""

    level: int  # queue level from 1, the highest
    tier: int  # within the level
    key: float  # within the tier


@dataclass(frozen=True, slots=True)
class Policy:
    """Settings are the fields of the dataclass. A claim changes only when the view does."""

    preemptive: ClassVar[bool]
    learns: ClassVar[bool] = False  # whether claims depend on what finished requests teach
    perceptive: ClassVar[bool] = False  # whether it tells requests that are perceptible from others
    asks: ClassVar[bool] = True  # whether claims depend on what is predicted of a request

    @property
    def levels(self) -> int:
        """Number of queues."""
        return 1

    @property
    def overtaking_bound(self) -> int:
        """How many times the work ahead of a request may be served before it (`core.overtaking`); 0: no bound."""
        return 0

    @property
    def pause_bound_s(self) -> float:
        """For how long a stream that has begun may pause (`core.pauses`); 0: no bound."""
        return 0.0

    @property
    def surest(self) -> float:
        """The least spread of a belief about a length (`core.beliefs.Length`) that is taken for true: in claims, and
        in what admission counts on."""
        return 0.0

    def perceives(self, view: View) -> bool:
        """Whether the request becomes perceptible now; a perceptive policy is asked when it comes and after each of
        its rounds, until it says yes once."""
        return False

    def claim(self, view: View, round_s: float) -> Claim:
        """`round_s`: nominal seconds of a round, of a full batch at the reference draft length."""
        raise NotImplementedError


def check_pause(bound_s: float) -> None:
    """Raises ValueError."""
    if bound_s != 0 and not 0.1 <= bound_s <= 1e6:
        raise ValueError("policy-set: max_pause_s must be 0 or from 0.1")


def check_overtaking(bound: int) -> None:
    """Raises ValueError."""
    if bound != 0 and not 2 <= bound <= 10_000:
        raise ValueError("policy-set: overtaking must be 0 or from 2 to 10000")
