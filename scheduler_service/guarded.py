"""A policy that somebody else wrote, in the live scheduler: no error of it ends a link or the service. No policy of our
own lives here."""

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
    told: set[tuple[str, ...]] = set()

    def tell(*failure: str) -> None:
        if failure not in told:
            told.add(failure)
            structlog.get_logger().error("policy_failed", policy=kind.__qualname__, trace=failure)

    def claim(self: Any, view: View, round_s: float) -> Claim:
        try:
            made = kind.claim(self, view, round_s)
            if not isinstance(made, Claim) or not all(isinstance(part, Real) and part == part for part in made):
                tell(f"no Claim of three numbers, but {type(made).__name__}")
            elif made.level not in range(1, levels + 1):
                tell(f"a level that is not from 1 to its `levels`, {levels}")
            else:
                return made
        except Exception as error:
            tell(*trace(error))
        return Claim(levels, LAST, view.request.arrival)

    def perceives(self: Any, view: View) -> bool:
        try:
            return bool(kind.perceives(self, view))
        except Exception as error:
            tell(*trace(error))
            return False

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__slots__": ()}
    try:
        guards = type(kind.__name__, (kind,), {**names, "claim": claim, "perceives": perceives})
    except Exception as error:  # of its __init_subclass__
        raise ValueError(f"policy: no class can be derived from it: {type(error).__name__}: {error}") from error
    object.__setattr__(policy, "__class__", guards)  # made anew it would check its settings twice
    return policy


def _levels(policy: Policy) -> int:
    """Raises ValueError."""
    try:
        levels = policy.levels
    except Exception as error:
        raise ValueError(f"policy: its `levels` fail: {type(error).__name__}: {error}") from error
    if levels not in range(1, LEVELS + 1):
        raise ValueError(f"policy: its `levels` must be from 1 to {LEVELS}")
    return levels
