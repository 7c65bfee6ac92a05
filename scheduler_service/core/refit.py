"""Whose claims follow next what finished requests have taught: a few per plan, so that a decision's time stays bounded.

Nothing is believed here; core/beliefs.py does.
"""

import math
from collections import OrderedDict
from itertools import islice

from scheduler_service.core.beliefs import FleetAcceptance, FleetLength

AT_ONCE = 8  # requests per plan
MOVED = 0.05  # in logarithms of tokens: so far has any part of what is believed to move to be worth the work
HINTS = (None, 64, 1024)  # tokens: where it is looked at


class Refit:
    """A carousel of the live requests of which finished ones teach something. It turns once when enough is new."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, None] = OrderedDict()  # the one that was told longest ago first
        self._left = 0  # of this turn
        self._look_at = 1  # finished requests
        self._known: list[float] = []  # at the last turn's start

    def join(self, id: str) -> None:
        self._ids[id] = None

    def leave(self, id: str) -> None:
        self._ids.pop(id, None)
        self._left = min(self._left, len(self._ids))

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
            self._left = len(self._ids)

    def due(self) -> list[str]:
        """The next to be told."""
        ids = list(islice(self._ids, min(AT_ONCE, self._left)))
        self._left -= len(ids)
        for id in ids:
            self._ids.move_to_end(id)
        return ids
