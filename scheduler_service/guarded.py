"""A policy that somebody else wrote, in the live scheduler: no error of it ends a link or the service. No policy of our
own lives here."""

from dataclasses import fields
from typing import Any

import structlog

from protos.logs import trace
from scheduler_service.core.policies import POLICIES, Claim, Policy
from scheduler_service.core.types import View
from scheduler_service.store.fields import LEVELS

LAST = 1 << 30  # a tier behind those of all policies


def guarded(policy: Policy) -> Policy:
    """The same policy. If it is not one of ours, a request that it fails for goes behind all others, in the order of
    arrival. Each failure is logged once, with its place in the code. Raises ValueError if it has too many levels."""
    kind = type(policy)
    if kind in POLICIES.values():
        return policy
    levels = policy.levels
    if not 1 <= levels <= LEVELS:
        raise ValueError(f"policy: its `levels` must be from 1 to {LEVELS}")
    told: set[tuple[str, ...]] = set()

    def tell(*failure: str) -> None:
        if failure not in told:
            told.add(failure)
            structlog.get_logger().error("policy_failed", policy=kind.__qualname__, trace=failure)

    def claim(self: Any, view: View, round_s: float) -> Claim:
        try:
            made = kind.claim(self, view, round_s)
            if not isinstance(made, Claim) or not all(isinstance(part, int | float) and part == part for part in made):
                tell(f"no Claim of numbers: {made!r:.100}")
            elif made.level not in range(1, levels + 1):
                tell(f"level {made.level}, where `levels` is {levels}")
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

    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "claim": claim, "perceives": perceives}
    settings = {each.name: getattr(policy, each.name) for each in fields(kind)}
    made: Policy = type(kind.__name__, (kind,), body)(**settings)
    return made
