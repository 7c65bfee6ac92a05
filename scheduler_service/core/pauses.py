"""A bound on pauses: a stream that has begun gets a round before it has been without tokens for too long. No policy is
here.

**Claim.** On one worker, among the requests of one class and tenant, with memory for the KV of all that have begun, no
stream waits for its next token much longer than the bound. **Why.** Due streams go before all others, each until its
next round, the one that waits longest first. Whoever is due at a moment had a round one bound earlier, in which the
worker ran as many as it has slots: so no more are due than it has slots, as long as rounds last equally long. Newcomers
are opened in what the due ones leave, so no flood of them breaks the bound; it opens them more slowly.

A stream is due MARGIN_ROUNDS early: its round must still be planned and run. Where KV was dropped it is computed again
first, and longer rounds (long prompts) make a pause as much longer. Overdue requests (core/overtaking.py) go after due
streams, which need one round each. A stream that an earlier scheduler left is due at once.
"""

import heapq
import math
from collections.abc import Iterator, Mapping

from scheduler_service.core.entry import Entry

MARGIN_ROUNDS = 5  # the one under way, with plans a round late two more, its own, and one to spare


class Pauses:
    """`bound_s`: that a stream may pause for."""

    def __init__(self, bound_s: float) -> None:
        self._bound_s = bound_s
        self._due: list[tuple[float, str]] = []  # heap, one entry for each stream: not before when it can be due

    def began(self, id: str, at: float = -math.inf) -> None:
        """It has had a token, for the first time that this scheduler knows of."""
        heapq.heappush(self._due, (at, id))

    def due(self, entries: Mapping[str, Entry], round_s: float, now: float) -> Iterator[Entry]:
        """Streams that have become due. `round_s`: nominal seconds of a round."""
        within_s = max(self._bound_s - MARGIN_ROUNDS * round_s, round_s)
        if len(self._due) > 2 * len(entries) + 64:  # most are of streams that have ended
            self._due = [one for one in self._due if one[1] in entries]
            heapq.heapify(self._due)
        while self._due and self._due[0][0] <= now:
            _, id = heapq.heappop(self._due)
            entry = entries.get(id)
            if entry is None:
                continue
            if entry.last_token_s + within_s <= now and not entry.due:
                yield entry
            heapq.heappush(self._due, (max(entry.last_token_s, now - within_s + round_s) + within_s, id))
