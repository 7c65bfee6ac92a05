"""The port that every policy fills. No policy lives here."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from scheduler_service.core.types import View


class Claim(NamedTuple):
    """A request's place in the order, compared field by field, lower first."""

    level: int  # queue level from 1, the highest
    tier: int  # within the level
    key: float  # within the tier


SURELY = 1 + 1e-9  # times a sum of seconds is no less than the same seconds added up in another order


@dataclass(frozen=True, slots=True)
class Policy:
    """Settings are the fields of the dataclass. A claim changes only when the view does."""

    preemptive: ClassVar[bool]
    learns: ClassVar[bool] = False  # whether claims depend on what finished requests teach
    perceptive: ClassVar[bool] = False  # whether it tells requests that are perceptible from others
    asks: ClassVar[bool] = True  # whether claims depend on what is predicted of a request
    # Whether neither `claim` nor `worst` ever gets better where finished requests were longer and had fewer tokens of a
    # round drafted and accepted.
    monotone: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        """What a policy knows of its `worst` claims holds no longer for one that is derived from it and claims
        otherwise."""
        if "claim" in cls.__dict__ and "worst" not in cls.__dict__:
            cls.worst = Policy.worst  # type: ignore[method-assign]
        if not cls.__dict__.keys().isdisjoint(("claim", "worst")) and "monotone" not in cls.__dict__:
            cls.monotone = False

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

    def worst(self, view: View, round_s: float, rounds: int, tokens: int) -> Claim | None:
        """A claim that none of this running request goes behind, after any of the next `rounds` rounds, which bring it
        at most so many tokens. None: that is not known, and it is asked for its claim after each round."""
        return None

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
