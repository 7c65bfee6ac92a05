"""Requests that may have killed the worker they ran on: the suspects. Keeps the account; plans nothing.

When a worker dies, every request that may have been under way on it becomes a suspect. Suspects run on a worker that is
quarantined: it has no other requests. They run group by group, and a suspect is cleared when it has gone on for
PROBATION_ROUNDS rounds. If a quarantined worker dies, its group is divided, in the end into requests that run alone. A
request is ended only if its worker died `max_deaths` times in a row while it ran alone. So no request is ever ended for
what its neighbour did. core/placement.py chooses the groups.
"""

from collections.abc import Iterable, Mapping

from scheduler_service.core.entry import Entry, Worker
from scheduler_service.core.events import Held

# With output. A worker reports after fewer rounds (MOST_UNREPORTED there), so one that dies of a request has not
# reported so many rounds of it since.
PROBATION_ROUNDS = 8


class Isolation:
    """`max_deaths`: workers that may die while a request runs there alone, until it is ended."""

    def __init__(self, max_deaths: int) -> None:
        self.suspects: dict[str, Entry] = {}  # live, each without a worker or on a quarantined one
        self._max_deaths = max_deaths

    def accuse(self, worker: Worker, entries: Mapping[str, Entry]) -> set[Entry]:
        """The worker seems to have died. Returns the requests that it may have been running."""
        crowd = len(worker.listed)
        known = [entries[id] for id in worker.listed if id in entries]
        accused = [entry for entry in known if entry.home == worker.up.worker]  # not those that have moved since
        for entry in accused:
            entry.deaths += crowd == 1
            entry.probation, entry.changed = PROBATION_ROUNDS, True
            entry.suspected, entry.accuser, entry.crowd = entry.placement, worker.up.worker, crowd
            self.suspects[entry.request.id] = entry
        return set(accused)

    def acquit(self, worker: str, held: Iterable[Held]) -> None:
        """A worker has come back. If it still holds requests, under the placements that it had before, it had not died,
        only its link was cut: neither they nor those that were on their way to it are suspects any longer."""
        placements = {one.id: one.placement for one in held}
        for id, entry in list(self.suspects.items()):
            accused_here = entry.accuser == worker
            if accused_here:
                entry.accuser = ""
            if placements and (accused_here or placements.get(id) == entry.suspected):
                entry.deaths, entry.changed = max(0, entry.deaths - (entry.crowd == 1)), True
                if not entry.deaths:
                    self._clear(entry)

    def is_guilty(self, entry: Entry) -> bool:
        return entry.deaths >= self._max_deaths

    def join(self, entry: Entry) -> None:
        """It is live from now on."""
        if entry.probation:
            self.suspects[entry.request.id] = entry

    def leave(self, entry: Entry) -> None:
        self.suspects.pop(entry.request.id, None)

    def served(self, entry: Entry) -> None:
        """A round of it has brought output."""
        if entry.probation:
            entry.probation, entry.changed = entry.probation - 1, True
            if not entry.probation:
                self._clear(entry)

    def _clear(self, entry: Entry) -> None:
        entry.deaths, entry.probation, entry.changed = 0, 0, True
        self.leave(entry)

    def quarantined(self, worker: Worker) -> list[Entry]:
        """The suspects that have this worker to themselves. []: the worker is not quarantined."""
        if not worker.quarantined:
            return []
        found = map(self.suspects.get, worker.quarantined)
        return [entry for entry in found if entry is not None and entry.home == worker.up.worker]

    @property
    def waiting(self) -> list[Entry]:
        """Suspects without a worker."""
        return [entry for entry in self.suspects.values() if entry.home is None]
