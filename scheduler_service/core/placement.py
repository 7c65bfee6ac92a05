"""Which requests a worker runs: its own, those without a worker, those that wait at another. Makes no whole plan."""

from bisect import insort
from collections.abc import Iterator
from itertools import islice

from scheduler_service.core import kv
from scheduler_service.core.entry import Entry, Worker
from scheduler_service.core.fair_ranking import FairRanking
from scheduler_service.core.fleet import Fleet
from scheduler_service.core.front import in_order
from scheduler_service.core.lifecycle import State
from scheduler_service.core.ranking import Key

SPARES = 8  # requests listed at most beside those that run: no more end in a round or two, and each makes plans dearer
FEW_PLANS_SPARES = 4  # under `few_plans` one for so many slots, if those are more: one plan is to last several rounds
LOOKED_AT = 64  # requests without a worker, when it is asked whether an idle worker could run one
PASSED_OVER = 32  # requests that a worker keeps, in a search for one that another worker may claim
# Into so many groups the suspects of a death are divided, and each group runs apart. With fewer groups more workers die
# until the guilty request is found; with more groups all suspects are slower, since few of them share a round.
GROUPS = 16


def choose(fleet: Fleet, name: str) -> list[Entry]:
    """The requests with the best claims to this worker, best first. Those that are new there are placed on it.

    The worker may also take over requests that wait at another worker: as many as it has idle slots, then at most one
    more in each plan. More would be waste: the other worker will soon run them itself, and every move sends the
    request's tokens again.
    """
    worker = fleet.workers[name]
    chosen: list[Entry] = []
    slots = worker.up.slots
    for key in _best(fleet, worker, most_listed(fleet, worker)):
        entry = fleet.entries[key[-1]]
        if entry.home is None:
            fleet.place(entry, name)
        chosen.append(entry)
    more = not worker.draining
    while more and (claimed := claimable(fleet, name, chosen[:slots])) is not None:
        more = len(chosen) < slots
        fleet.place(claimed, name)
        insort(chosen, claimed, key=lambda entry: entry.key)
    return chosen


def displace_outgrown(fleet: Fleet, worker: Worker) -> None:
    """Requests that have become too long for this worker's memory go to a larger one; it may have come since."""
    for entry in filter(fleet.has_stopped, outgrown(fleet, worker)):
        fleet.displace(entry)


def outgrown(fleet: Fleet, worker: Worker) -> list[Entry]:
    """Those of the worker's next requests that have become too long for its memory."""
    if worker.memory_tokens >= fleet.largest:
        return []
    following = (fleet.entries[key[-1]] for key in islice(worker.ranking, most_listed(fleet, worker)))
    return [entry for entry in following if not worker.holds(entry)]


def choose_suspects(fleet: Fleet, name: str) -> list[Entry] | None:
    """The requests that the worker runs if it is quarantined, or is to be from now on. None: it is like any other."""
    isolation = fleet.isolation
    if not isolation.suspects:
        return None
    worker = fleet.workers[name]
    suspects = isolation.quarantined(worker)
    if not suspects and name == to_quarantine(fleet):
        suspects = _next_group(fleet, worker)
        for entry in suspects:
            fleet.place(entry, name)
        worker.quarantined = tuple(entry.request.id for entry in suspects)
    if suspects and not worker.listed.keys() <= set(worker.quarantined):
        return []  # first what may still be under way there must end
    return suspects or None


def to_quarantine(fleet: Fleet) -> str | None:
    """The worker to be quarantined next, if any: one at a time, so that the others serve the requests that nobody
    suspects."""
    isolation = fleet.isolation
    waiting = isolation.waiting
    if not waiting or any(map(isolation.quarantined, fleet.workers.values())):
        return None
    return hungriest(fleet, waiting)


def _next_group(fleet: Fleet, worker: Worker) -> list[Entry]:
    """The suspects that go next: the first of those that wait and that this worker can hold, and some that were
    suspected with it."""
    waiting = sorted(filter(worker.holds, fleet.isolation.waiting), key=lambda entry: entry.key)
    crowd = waiting[0].crowd
    return [entry for entry in waiting if entry.crowd == crowd][: min(worker.up.slots, -(-crowd // GROUPS))]


def hungriest(fleet: Fleet, entries: list[Entry]) -> str | None:
    """The worker that one of these is best offered to first: with most vacant slots, of those that can hold it."""
    return next((name for name in _hungry(fleet) if any(map(fleet.workers[name].holds, entries))), None)


def _hungry(fleet: Fleet) -> Iterator[str]:
    """The workers that requests are offered to, the one with most vacant slots first."""
    for name in fleet.vacancies.most():
        worker = fleet.workers[name]
        if not worker.draining and not (worker.quarantined and fleet.isolation.quarantined(worker)):
            yield name


def called_for(fleet: Fleet, id: str) -> str | None:
    """The worker that should plan at once since this request has come: the hungriest that can hold it, if the newcomer
    is to run there next or spares are missing. Else the plan that answers its next report is early enough."""
    entry = fleet.entries[id]
    if (name := hungriest(fleet, [entry])) is None:
        return None
    worker = fleet.workers[name]
    spared = len(worker.ranking) >= most_listed(fleet, worker)
    last = worker.ranking.at(worker.up.slots - 1) if spared else None  # of those that run next
    return None if last is not None and last < entry.key else name


def idle_beside_work(fleet: Fleet) -> str | None:
    """A worker with a vacant slot, if it could claim a request that waits elsewhere: it should plan."""
    tried = -1  # tokens: a worker that holds no more would find nothing either
    for name in _hungry(fleet):
        worker = fleet.workers[name]
        if worker.vacancy <= 0 or tried >= fleet.largest:
            return None
        if worker.memory_tokens > tried:
            if name == to_quarantine(fleet) or _is_offered(fleet, worker) or claimable(fleet, name, []):
                return name
            tried = worker.memory_tokens
    return None


def _is_offered(fleet: Fleet, worker: Worker) -> bool:
    """Whether it can hold one of the best requests that have no worker, other than suspects. Not all are looked at: a
    worker's command waits for the answer."""
    isolation = fleet.isolation
    best = fleet.unplaced.first(LOOKED_AT + len(isolation.waiting))
    return any(key[-1] not in isolation.suspects and worker.holds(fleet.entries[key[-1]]) for key in best)


def most_listed(fleet: Fleet, worker: Worker) -> int:
    """Requests in a plan of this worker."""
    slots = worker.up.slots
    spares = max(SPARES, slots // FEW_PLANS_SPARES if fleet.few_plans else 0)
    if fleet.ready_first:  # as many again, while the drafts of the others are made
        spares = max(spares, min(slots, worker.up.cost.chains - slots))
    return slots + min(slots, spares)


def _best(fleet: Fleet, worker: Worker, limit: int) -> list[Key]:
    """The best of what the worker has and of what has no worker. Suspects are left out: they run apart."""
    suspects = fleet.isolation.suspects
    own = _first(fleet, worker, worker.ranking, limit + len(suspects))
    offered: list[Key] = []
    if not worker.draining:
        best = None if suspects or len(own) < limit else fleet.unplaced.at(0)
        if suspects or len(own) < limit or (best is not None and best < own[-1]):  # mostly nobody can get in
            offered = _first(fleet, worker, fleet.unplaced, limit + len(suspects))
    keys = in_order(own + offered) if offered else own
    return [key for key in keys if key[-1] not in suspects][:limit] if suspects else keys[:limit]


def _first(fleet: Fleet, worker: Worker, ranking: FairRanking, limit: int) -> list[Key]:
    """The best of those that the worker can hold."""
    if worker.memory_tokens >= fleet.largest:
        return ranking.first(limit)
    held = (key for key in ranking if worker.holds(fleet.entries[key[-1]]))
    return list(islice(held, limit))


def claimable(fleet: Fleet, name: str, batch: list[Entry]) -> Entry | None:
    """The best request that waits at another worker and is better off in the next `batch` of this one.

    That is one without KV there and with a better claim than the last of the batch. If a slot here would idle it is any
    one without KV there, or one whose KV is computed anew here before the other worker has room for it; else one that
    waits there for memory, if there is enough here.
    """
    worker = fleet.workers[name]
    last = batch[-1].key if len(batch) == worker.up.slots else None  # None: a slot would idle
    best: Entry | None = None
    for donor, slots in _donors(fleet, name):
        first = donor.ranking.at(slots) if last is None else _spare(fleet, donor, slots)
        if first is None or (last is not None and first >= last) or (best is not None and first >= best.key):
            continue  # so for most donors: to list those that wait there would cost more
        for key in donor.ranking.beyond(slots):
            if (best and key >= best.key) or (last is not None and key >= last):
                break
            entry = fleet.entries[key[-1]]
            if _may_move(fleet, entry, donor, worker, idle=last is None):
                best = entry
                break
    return _waiting_for_memory(fleet, worker) if best is None and last is None else best


def _spare(fleet: Fleet, donor: Worker, slots: int) -> Key | None:
    """No request that waits at `donor` without KV there has a better key than this one. None: there is no such request.

    It is kept until the worker reports or is planned for, or the order of its requests changes: with many workers most
    keys stay what they were from one plan to the next.
    """
    now = slots, donor.reports, donor.planned, donor.ranking.version
    before, key = donor.spare
    if before != now:
        key = None
        for passed, key in enumerate(donor.ranking.beyond(slots), 1):
            entry = fleet.entries[key[-1]]
            if passed == PASSED_OVER or not (entry.state is State.RUNNING or entry.blocks or entry.offloaded):
                break
        else:
            key = None
        donor.spare = now, key
    return key


def _waiting_for_memory(fleet: Fleet, worker: Worker) -> Entry | None:
    """The best request that has no memory where it waits, and would have it here."""
    others = [other for other in fleet.workers.values() if other.left_out and other is not worker]
    if not others:
        return None
    own = fleet.homed(worker)
    free = worker.free_blocks - sum([kv.need(worker, entry) for entry in own])
    best: Entry | None = None
    for other in others:
        for entry in filter(None, map(fleet.entries.get, other.left_out)):
            waits = entry.home == other.up.worker and entry.state is State.WAITING and not entry.offloaded
            if not waits or (best and entry.key >= best.key) or worker.blocks_for(entry) > free:
                continue
            if _may_move(fleet, entry, other, worker, idle=True) and (
                not fleet.foresight or kv.may_begin(worker, own, entry)
            ):
                best = entry
    return best


def _donors(fleet: Fleet, name: str) -> Iterator[tuple[Worker, int]]:
    """The other workers where requests may wait, each with the slots that its best requests run in."""
    # Where there are suspects a worker may be quarantined, however many requests it has.
    for other in fleet.workers if fleet.isolation.suspects else fleet.vacancies.short():
        donor = fleet.workers[other]
        quarantined = bool(donor.quarantined and fleet.isolation.quarantined(donor))
        if other != name and (quarantined or donor.vacancy < 0):
            yield donor, 0 if quarantined else donor.up.slots  # suspects run in the slots of a quarantined worker


def _may_move(fleet: Fleet, entry: Entry, donor: Worker, worker: Worker, *, idle: bool) -> bool:
    """Whether `worker` may take over the request from `donor`. `idle`: one of its slots would be. What runs stays, and
    so does one on probation."""
    if entry.state is State.RUNNING or entry.probation or not worker.holds(entry):
        return False
    if not (entry.blocks or entry.offloaded):
        return True
    return idle and entry.tokens * worker.up.cost.prefill_token_s < _next_end_s(fleet, donor)


def _next_end_s(fleet: Fleet, worker: Worker) -> float:
    """Seconds until the first of those that go first there is believed to end."""
    first = (fleet.entries[key[-1]] for key in worker.ranking.first(worker.up.slots))
    return min(map(fleet.believed_rounds, first)) * worker.up.cost.round_s(fleet.draft_len, worker.up.slots)
