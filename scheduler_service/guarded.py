"""A policy that somebody else wrote: no error of it ends a link, the service or a simulation. No policy of our own is
here."""

from dataclasses import fields
from numbers import Real
from typing import Any

import structlog

from protos.logs import trace
from scheduler_service.core.policies import POLICIES, Claim, Policy
from scheduler_service.core.types import View
from scheduler_service.store.fields import LEVELS

LAST = 1 << 30  # a tier behind those of all policies


def guarded(policy: Policy) -> Policy:
    """The same policy. If it is not one of ours, a request that it fails for goes behind all others, in the order of
    arrival. Each kind of failure is logged once, with its place in the code. Raises ValueError if it has too many
    levels, or cannot be derived from."""
    kind = type(policy)
    if kind in POLICIES.values():
        return policy
    levels = _levels(policy)
    _check_settled(policy)
    told: set[tuple[str, ...]] = set()

    def tell(*failure: str) -> None:
        if failure not in told:
            told.add(failure)
            structlog.get_logger().error("policy_failed", policy=kind.__qualname__, trace=failure)

    def claim(self: Any, view: View, round_s: float) -> Claim:
        try:
            made = kind.claim(self, view, round_s)
            if not isinstance(made, Claim) or not all(isinstance(part, Real) and part == part for part in made):
                tell(f"no Claim of three numbers, of which NaN is none, but {type(made).__name__}")
            elif made.level not in range(1, levels + 1):
                tell(f"a level that is not from 1 to its `levels`, {levels}")
            elif int(made.tier) != made.tier or abs(made.tier) > LAST:
                tell(f"a tier that is no whole number, or beyond {LAST}")
            else:  # numbers of Python's own, which the store can write: numpy's are Real, too
                return Claim(int(made.level), int(made.tier), float(made.key))
        except Exception as error:
            tell(*trace(error))
        return Claim(levels, LAST, view.request.arrival)

    def perceives(self: Any, view: View) -> bool:
        try:
            return bool(kind.perceives(self, view))
        except Exception as error:
            tell(*trace(error))
            return False

    def reduced(self: Any) -> tuple[Any, ...]:
        """For pickle: the class is made here, and nobody else can import it."""
        bare = object.__new__(kind)
        for each in fields(self):
            object.__setattr__(bare, each.name, getattr(self, each.name))
        return guarded, (bare,)

    own = {"claim": claim, "perceives": perceives, "__reduce__": reduced, "__slots__": ()}
    try:
        guards = type(kind.__name__, (kind,), {"__module__": kind.__module__, "__qualname__": kind.__qualname__, **own})
    except Exception as error:  # of its __init_subclass__
        raise ValueError(f"policy: no class can be derived from it: {type(error).__name__}: {error}") from error
    object.__setattr__(policy, "__class__", guards)  # made anew it would check its settings twice
    return policy


def _check_settled(policy: Policy) -> None:
    """Ask the policy once for what it says of itself: each submission asks again, and no request could come in where
    that fails. Raises ValueError."""
    for name in ("preemptive", "overtaking_bound", "pause_bound_s", "surest"):
        try:
            getattr(policy, name)
        except Exception as error:
            raise ValueError(f"policy: its `{name}` fails: {type(error).__name__}: {error}") from error


def _levels(policy: Policy) -> int:
    """Raises ValueError."""
    try:
        levels = policy.levels
    except Exception as error:
        raise ValueError(f"policy: its `levels` fail: {type(error).__name__}: {error}") from error
    if levels not in range(1, LEVELS + 1):
        raise ValueError(f"policy: its `levels` must be from 1 to {LEVELS}")
    return levels
