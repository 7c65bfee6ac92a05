"""Which requests get a new claim next because finished ones have taught something, or costs have come: a few per plan,
so that the time of a decision stays bounded.

What is believed is not here, but in core/beliefs.py and core/known.py.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from scheduler_service.core.beliefs import FleetAcceptance, FleetLength

AT_ONCE = 8  # requests per plan
MOVED = 0.05  # in logarithms of tokens: a belief that moved by less is not worth the work
HINTS = (None, 64, 1024)  # tokens: for requests with these hints the belief about lengths is compared


class Refit:
    """The live requests of which finished ones teach something, in a circle. When the beliefs have moved, each of them
    gets a new claim once, AT_ONCE at a time."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, None] = OrderedDict()  # the one whose claim is oldest first
        self._remaining = 0  # requests that get a new claim before this is over
        self._look_at = 1  # finished requests, after which the beliefs are compared next
        self._known: list[float] = []  # the beliefs when all began to get new claims last
        self._costless: dict[str, None] = {}  # live requests with claims of before the first worker's costs were known

    def join(self, id: str) -> None:
        self._ids[id] = None

    def leave(self, id: str) -> None:
        self._ids.pop(id, None)
        self._costless.pop(id, None)
        self._remaining = min(self._remaining, len(self._ids))

    def forget(self) -> None:
        """All beliefs begin anew."""
        self._look_at, self._known = 1, []

    def learned(self, length: FleetLength, acceptance: FleetAcceptance) -> None:
        """One more has finished, and this is believed now."""
        if length.finished < self._look_at:
            return
        self._look_at = length.finished + 1 + min(100, length.finished // 10)
        beliefs = map(length.belief, HINTS)
        known = [math.log(acceptance.per_round + 1), math.log(acceptance.drafts_per_round + 1)]
        known += [part for each in beliefs for part in (each.location, each.spread)]
        if not self._known or max(abs(new - old) for new, old in zip(known, self._known, strict=True)) > MOVED:
            self._known = known
            self._remaining = len(self._ids)

    def costs_came(self, ids: Iterable[str]) -> None:
        """The first worker has. Each of these gets a new claim, whatever finished requests teach of it."""
        self._costless = dict.fromkeys(ids)

    def costless(self) -> list[str]:
        """The next of those."""
        ids = list(islice(self._costless, AT_ONCE))
        for id in ids:
            del self._costless[id]
        return ids

    @property
    def pending(self) -> bool:
        """Whether any request gets a new claim with the next plan."""
        return self._remaining > 0 or bool(self._costless)

    def due(self) -> list[str]:
        """The next requests that get a new claim."""
        if not self._remaining:
            return []
        ids = list(islice(self._ids, min(AT_ONCE, self._remaining)))
        self._remaining -= len(ids)
        for id in ids:
            self._ids.move_to_end(id)
        return ids
