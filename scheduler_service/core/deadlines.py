"""The deadlines of live requests, the next one first. What is done when one passes is not decided here."""

from collections.abc import Iterator, Mapping

from scheduler_service.core.entry import Entry
from scheduler_service.core.ranking import Ranking


class Deadlines:
    def __init__(self, entries: Mapping[str, Entry]) -> None:
        """`entries`: the live requests."""
        self._entries = entries
        self._next = Ranking()  # deadline and id

    def __len__(self) -> int:
        return len(self._next)

    def add(self, entry: Entry) -> None:
        if entry.request.deadline is not None:
            self._next.add((entry.request.deadline, entry.request.id))

    def leave(self, entry: Entry) -> None:
        """It is live no longer."""
        if entry.request.deadline is not None:
            self._next.remove((entry.request.deadline, entry.request.id))

    def passed(self, now: float) -> Iterator[Entry]:
        """Those live whose deadline has passed, until they leave."""
        while len(self._next) and self._next.best[0] <= now:
            yield self._entries[self._next.best[-1]]
