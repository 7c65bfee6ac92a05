"""Requests that may have killed the worker they ran on: they run apart until that is settled. Decides no other order.

Whoever may have been under way on a worker that died is a suspect. Suspects run on a worker that has nobody else,
group by group, and clear themselves by going on for some rounds. A group whose worker dies is divided, at last into
requests that run alone; only who was alone when its worker died, `max_deaths` times in a row, is ended. So no request
is ever ended for what its neighbour did.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from scheduler_service.core import placement
from scheduler_service.core.entry import Entry, Worker
from scheduler_service.core.types import Held

if TYPE_CHECKING:
    from scheduler_service.core.core import Core

PROBATION_ROUNDS = 8  # with output: further than a worker was ahead of its reports when it died
GROUPS = 16  # that the suspects of a death are divided into: rounds alone are slow, and deaths slower


class Isolation:
    def __init__(self, max_deaths: int) -> None:
        self.suspects: dict[str, Entry] = {}  # live, each without a worker or on one that is set apart
        self._max_deaths = max_deaths

    def accuse(self, worker: Worker, entries: Mapping[str, Entry]) -> set[Entry]:
        """It seems to have died. Returns whom it may have been running."""
        crowd = len(worker.listed)
        known = [entries[id] for id in worker.listed if id in entries]
        accused = [entry for entry in known if entry.home == worker.up.worker]  # not who has gone elsewhere since
        for entry in accused:
            entry.deaths += crowd == 1
            entry.probation = PROBATION_ROUNDS
            entry.suspected, entry.crowd = entry.placement, crowd
            self.suspects[entry.request.id] = entry
        return set(accused)

    def acquit(self, held: Iterable[Held]) -> None:
        """A worker that still has what it had when it was lost had not died: only its link was cut."""
        for one in held:
            entry = self.suspects.get(one.id)
            if entry is not None and entry.suspected == one.placement:
                entry.deaths = max(0, entry.deaths - (entry.crowd == 1))
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
            entry.probation -= 1
            if not entry.probation:
                self._clear(entry)

    def _clear(self, entry: Entry) -> None:
        entry.deaths = entry.probation = 0
        self.leave(entry)

    def held(self, worker: Worker) -> list[Entry]:
        """The suspects that have this worker to themselves; []: it is one as any other."""
        if not worker.apart:
            return []
        found = map(self.suspects.get, worker.apart)
        return [entry for entry in found if entry is not None and entry.home == worker.up.worker]

    @property
    def waiting(self) -> int:
        """Suspects without a worker."""
        return sum(entry.home is None for entry in self.suspects.values())

    def due(self, core: "Core") -> bool:
        """Whether a worker is to be set apart: one at a time, so that the others serve whom nobody suspects."""
        return self.waiting > 0 and not any(map(self.held, core.workers.values()))

    def plan(self, core: "Core", name: str) -> list[Entry] | None:
        """Whom the worker runs if it is set apart, or is to be from now on. None: it is one as any other."""
        if not self.suspects:
            return None
        worker = core.workers[name]
        held = self.held(worker)
        if not held and self.due(core) and name == placement.hungriest(core):
            held = self._group(worker.up.slots)
            for entry in held:
                core.place(entry, name)
            worker.apart = tuple(entry.request.id for entry in held)
        if held and not worker.listed.keys() <= set(worker.apart):
            return []  # first comes the end of what may be under way
        return held or None

    def _group(self, slots: int) -> list[Entry]:
        """Who goes next: of those that wait the first, and some that were suspected with it."""
        waiting = sorted((entry for entry in self.suspects.values() if entry.home is None), key=lambda entry: entry.key)
        crowd = waiting[0].crowd
        return [entry for entry in waiting if entry.crowd == crowd][: min(slots, -(-crowd // GROUPS))]
