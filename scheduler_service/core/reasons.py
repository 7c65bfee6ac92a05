"""Why a live request does not run now, for people. Decides and changes nothing."""

from collections.abc import Iterator
from enum import Enum, auto
from itertools import chain, islice

from scheduler_service.core.entry import Entry
from scheduler_service.core.fleet import Fleet
from scheduler_service.core.lifecycle import State

LOOKED_AT = 64  # requests that run, at most: so that the cost of an answer stays bounded
NAMED = 4  # requests that passed it, at most


class Reason(Enum):
    """The first difference between the keys of a request and of one that runs (`Fleet.key`)."""

    NO_WORKER = auto()
    SUSPECT = auto()
    TURN = auto()  # none that runs goes before it
    BEGUN = auto()
    CLASS = auto()
    TENANT = auto()
    OVERDUE = auto()
    LEVEL = auto()
    PERCEPTIBLE = auto()
    CLAIM = auto()
    ARRIVAL = auto()


def why(fleet: Fleet, id: str) -> tuple[Reason, list[str]] | None:
    """Why it waits, and which requests run now though they came later, the best placed first. None: it runs."""
    entry = fleet.entries[id]
    if entry.state is State.RUNNING:
        return None
    if not fleet.workers:
        return Reason.NO_WORKER, []
    if entry.probation:
        return Reason.SUSPECT, []
    before = sorted((one for one in _running(fleet, entry) if one.key < entry.key), key=lambda one: one.key)
    if not before:
        return Reason.TURN, []
    passed = [one.request.id for one in before if one.request.arrival > entry.request.arrival]
    return _difference(entry, before[-1]), passed[:NAMED]


def _running(fleet: Fleet, entry: Entry) -> Iterator[Entry]:
    """Those that run on its worker; without one, on any."""
    home = fleet.workers.get(entry.home or "")
    workers = [home] if home is not None else fleet.workers.values()
    ids = islice(chain.from_iterable(worker.running for worker in workers), LOOKED_AT)
    return (fleet.entries[id] for id in ids if id in fleet.entries)


def _difference(entry: Entry, before: Entry) -> Reason:
    """Why `before` goes before `entry`. The worst placed of those that run is compared: its slot comes free first."""
    (began, klass, flow, *_), (waits, own_class, own_flow, *_) = before.key, entry.key
    first, own = before.claim, entry.claim
    if began != waits:
        return Reason.BEGUN
    if klass != own_class:
        return Reason.CLASS
    if flow != own_flow:
        return Reason.TENANT
    if before.overdue:
        return Reason.OVERDUE
    if first.level != own.level:
        return Reason.LEVEL
    if first.tier != own.tier:
        return Reason.PERCEPTIBLE
    by_arrival = first.key == before.request.arrival and own.key == entry.request.arrival
    return Reason.ARRIVAL if by_arrival or first.key == own.key else Reason.CLAIM
