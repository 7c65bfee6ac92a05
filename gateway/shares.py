"""A bound on what one caller may hold at a time, so that none locks out the others. Knows neither calls nor
requests."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from protos.errors import QueueFull

SHARE = 4  # times what is free: who is alone takes four fifths, and the more others take the less each may


class Shares:
    """Dynamic thresholds (Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches",
    1998): who has some may take more while it has less than SHARE times what would be left. Who has none always may."""

    def __init__(self, places: int, what: str, retry_after_ms: int) -> None:
        """`what` they are, and when to come again, for who is told that it has too many."""
        self._free, self._what, self._retry_after_ms = places, what, retry_after_ms
        self._taken: Counter[str] = Counter()

    @contextmanager
    def place(self, who: str) -> Iterator[None]:
        """Raises QueueFull."""
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
