"""The deadlines of live requests, the next one first. What is done when one passes is not decided here."""

import heapq
from collections.abc import Iterator, Mapping

from laps_sd_vllm._core.scheduler_service.core.entry import Entry


class Deadlines:
    def __init__(self, entries: Mapping[str, Entry]) -> None:
        """`entries`: the live requests."""
        self._entries = entries
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, entry: Entry) -> None:
        if entry.request.deadline is not None:
            heapq.heappush(self._heap, (entry.request.deadline, entry.request.id))
            if len(self._heap) > 2 * len(self._entries) + 64:
                self._forget_ended()

    def _forget_ended(self) -> None:
        """They would stay until they pass, which may be an hour."""
        live = ((entry.request.deadline, id) for id, entry in self._entries.items())
        self._heap = [(deadline, id) for deadline, id in live if deadline is not None]
        heapq.heapify(self._heap)

    def passed(self, now: float) -> Iterator[Entry]:
        """Those live whose deadline has passed, each once."""
        while self._heap and self._heap[0][0] <= now:
            deadline, id = heapq.heappop(self._heap)
            entry = self._entries.get(id)
            if entry is not None and entry.request.deadline == deadline:
                yield entry
