"""Whom a worker runs: of its own, of those without a worker, of those that wait at another. Draws up no whole plan."""

from bisect import insort
from typing import TYPE_CHECKING

from scheduler_service.core.entry import Entry, Worker
from scheduler_service.core.lifecycle import State
from scheduler_service.core.ranking import Key

if TYPE_CHECKING:
    from scheduler_service.core.core import Core

SPARES = 8  # listed at most beside those that run: more than end in a round or two, and each costs every plan


def choose(core: "Core", name: str) -> list[Entry]:
    """Who has the best claims to this worker, best first; those that are new there are placed.

    Of those that wait at others it takes whom its idle slots have room for, else one at a time: the others are about to
    run the rest, and each move is a payload sent twice.
    """
    worker = core.workers[name]
    rank: list[Entry] = []
    slots = worker.up.slots
    for key in _best(core, worker, _most_listed(worker)):
        entry = core.entries[key[-1]]
        if entry.home is None:
            core.place(entry, name)
        rank.append(entry)
    more = not worker.draining
    while more and (claimed := claimable(core, name, rank[:slots])) is not None:
        more = len(rank) < slots
        core.place(claimed, name)
        insort(rank, claimed, key=lambda entry: entry.key)
    return rank


def hungriest(core: "Core") -> str | None:
    """The worker that a new request is best offered to first."""
    open = [name for name, one in core.workers.items() if not (one.draining or core.isolation.held(one))]
    return max(open, key=lambda name: core.workers[name].vacancy, default=None)


def called_for(core: "Core", id: str) -> str | None:
    """The worker that plans at once since this request has come: the hungriest, if the newcomer is to run there next or
    spares are missing. Else the plan that answers its next report is early enough."""
    if (name := hungriest(core)) is None:
        return None
    worker = core.workers[name]
    spared = len(worker.ranking) >= _most_listed(worker)
    waits = spared and worker.ranking.first(worker.up.slots)[-1] < core.entries[id].key
    return None if waits else name


def idle_beside_work(core: "Core") -> str | None:
    """A worker with a vacant slot, if it could claim a request that waits elsewhere: it should plan."""
    name = hungriest(core)
    if name is None or core.workers[name].vacancy <= 0:
        return None
    offered = len(core.unplaced) > core.isolation.waiting or core.isolation.due(core)
    return name if offered or claimable(core, name, []) else None


def _most_listed(worker: Worker) -> int:
    return worker.up.slots + min(worker.up.slots, SPARES)


def _best(core: "Core", worker: Worker, limit: int) -> list[Key]:
    """The best of what the worker has and of what has no home yet; suspects run apart."""
    suspects = core.isolation.suspects
    offered = [] if worker.draining else core.unplaced.first(limit + len(suspects))
    best = sorted(worker.ranking.first(limit + len(suspects)) + offered)
    return [key for key in best if key[-1] not in suspects][:limit]


def claimable(core: "Core", name: str, batch: list[Entry]) -> Entry | None:
    """The best request that waits at another worker and is better off in the next `batch` of this one: it has no KV
    there and a better claim than the last of the batch; or a slot would idle, and waiting takes longer than computing
    its KV anew."""
    idle = len(batch) < core.workers[name].up.slots
    best = None
    for other, donor in core.workers.items():
        apart = bool(core.isolation.held(donor))  # then its slots are not for the others that it has
        if other == name or (donor.vacancy >= 0 and not apart):
            continue
        for key in donor.ranking.beyond(0 if apart else donor.up.slots):
            entry = core.entries[key[-1]]
            if (best and key >= best.key) or not (idle or key < batch[-1].key):
                break
            if entry.state is State.RUNNING or entry.probation:
                continue
            rebuild_s = entry.tokens * core.workers[name].up.cost.prefill_token_s
            if not (entry.blocks or entry.offloaded) or (idle and rebuild_s < _next_end_s(core, donor)):
                best = entry
                break
    return best


def _next_end_s(core: "Core", worker: Worker) -> float:
    """Seconds until the first of those that go first there is believed to end."""
    first = (core.entries[key[-1]] for key in worker.ranking.first(worker.up.slots))
    return min(map(core.believed_rounds, first)) * worker.up.cost.round_s(core.draft_len, worker.up.slots)
