"""The durable rounds of one live request, found again by token offset. It knows neither requests nor the store."""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator

from scheduler_service.store.rounds import LoggedRound, decode, shapes

MARK_EVERY = 16  # to find a round at most so many others are decoded


class RoundLog:
    """`stored`: the rounds in their stored form (store/rounds.py)."""

    def __init__(self, stored: bytes = b"") -> None:
        self.stored = bytearray()
        self.tokens = 0  # in all rounds
        self._rounds = 0
        self._starts: list[int] = []  # of every MARK_EVERYth round: the output tokens before it ...
        self._at: list[int] = []  # ... and the byte of `stored` where it begins
        for round in decode(stored):
            self.append(round, stored[len(self.stored) : len(self.stored) + round.size])

    def append(self, round: LoggedRound, encoded: bytes) -> None:
        """One round more, and its stored form."""
        if self._rounds % MARK_EVERY == 0:
            self._starts.append(round.start)
            self._at.append(len(self.stored))
        self._rounds += 1
        self.tokens = round.start + len(round.tokens)
        self.stored += encoded

    def since(self, offset: int) -> Iterator[LoggedRound]:
        """The rounds that have tokens from output token `offset` on; also those that are appended meanwhile."""
        if self._rounds:
            mark = max(0, bisect_right(self._starts, offset) - 1)
            for round in decode(self.stored, self._at[mark], self._starts[mark]):
                if round.start + len(round.tokens) > offset:
                    yield round

    def last(self, count: int) -> list[tuple[int, int, int]]:
        """Tokens, drafted and accepted of the last `count` rounds, the oldest first."""
        if not self._rounds or not count:
            return []
        mark = max(0, self._rounds - count) // MARK_EVERY
        return list(deque(shapes(self.stored, self._at[mark]), maxlen=count))

    def shapes(self) -> list[tuple[int, int, int]]:
        """Tokens, drafted and accepted of every round."""
        return list(shapes(self.stored))
