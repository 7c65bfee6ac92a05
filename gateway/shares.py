"""How many places (calls, streams) one caller may take at a time, so that none locks out the others. Knows neither
calls nor requests."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from protos.errors import QueueFull

SHARE = 4  # a caller may have this many times the free places: alone it gets four fifths, among others less


class Shares:
    """Dynamic thresholds (Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches",
    1998). A caller without a place always gets one. A caller with places gets another while it has fewer than SHARE
    times the places that would then still be free."""

    def __init__(self, places: int, what: str, retry_after_ms: int) -> None:
        """`what` the places are is told to a caller that has too many, and `retry_after_ms` when to try again."""
        self.most = max(1, -(-SHARE * (places - 1) // (SHARE + 1)))  # that a caller gets while it is alone
        self._free, self._what, self._retry_after_ms = places, what, retry_after_ms
        self._taken: Counter[str] = Counter()

    @contextmanager
    def place(self, who: str) -> Iterator[None]:
        """One place for the caller `who`, until the block ends. Raises QueueFull."""
        own = self._taken.get(who, 0)
        if own and own >= SHARE * (self._free - 1):
            problem = f"{own} {self._what} are yours, and others need the rest"
            raise QueueFull(problem, retry_after_ms=self._retry_after_ms)
        self._free -= 1
        self._taken[who] += 1
        try:
            yield
        finally:
            self._free += 1
            self._taken[who] -= 1
            if not self._taken[who]:
                del self._taken[who]
