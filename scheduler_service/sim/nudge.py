"""Nudge-like swaps, a reference that only simulations run: first come, first served, but that a smaller request may
pass a larger one.

Source: Grosof, Yang, Scully, Harchol-Balter, "Nudge: stochastically improving upon FCFS", POMACS 5(2), 2021: a small
job that finds a large one at the back of the queue is swapped with it, unless the large one was swapped before. What is
ours: smaller is half as long by prediction, and `passes` says how many a newcomer may pass, and how often a request may
be passed. One is as there; the more passes, the nearer to shortest job first.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from scheduler_service.core.policies import Claim, Policy
from scheduler_service.core.types import View

SMALLER = 0.5  # of the predicted length
APART = 1e-6  # seconds between the keys of neighbours at least: of requests that come at once, too, one may pass


@dataclass(slots=True)
class _Waiting:
    view: View
    key: float
    passed: int = 0


@dataclass(frozen=True, slots=True)
class Nudge(Policy):
    """It knows one queue, in which every request is put when it first claims."""

    preemptive: ClassVar[bool] = False

    passes: int = 1
    _queue: list[_Waiting] = field(default_factory=list)  # from its front
    _keys: dict[str, float] = field(default_factory=dict)

    @classmethod
    def parsed(cls, settings: Iterable[str]) -> "Nudge":
        """Of `passes=N`, or nothing. Raises ValueError."""
        passes = 1
        for setting in settings:
            name, _, value = setting.partition("=")
            if name != "passes" or not value.isdecimal():
                raise ValueError(f"policy-set: {setting!r} is not passes=N, the one setting of nudge")
            passes = int(value)
        return cls(passes)

    def claim(self, view: View, round_s: float) -> Claim:
        id = view.request.id
        if id not in self._keys:
            self._keys[id] = self._join(view)
        return Claim(1, 0, self._keys[id])

    def _join(self, view: View) -> float:
        """Behind the last one that it may not pass."""
        queue = self._queue
        while queue and queue[0].view.attained_s:
            del queue[0]
        at = len(queue)
        while at and len(queue) - at < self.passes and self._passes(view, queue[at - 1]):
            at -= 1
            queue[at].passed += 1
        ahead = queue[at - 1].key if at else -1.0
        key = (ahead + queue[at].key) / 2 if at < len(queue) else max(view.request.arrival, ahead + APART)
        queue.insert(at, _Waiting(view, key))
        return key

    def _passes(self, view: View, other: _Waiting) -> bool:
        waits = not other.view.attained_s
        return waits and other.passed < self.passes and view.predicted_tokens <= SMALLER * other.view.predicted_tokens
