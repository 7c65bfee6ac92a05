"""Which requests a worker runs: its own, those without a worker, those that wait at another. Makes no whole plan."""

from bisect import insort
from itertools import islice

from scheduler_service.core.entry import Entry, Worker
from scheduler_service.core.fair_ranking import FairRanking, in_order
from scheduler_service.core.fleet import Fleet
from scheduler_service.core.lifecycle import State
from scheduler_service.core.ranking import Key

SPARES = 8  # listed at most beside those that run: more than end in a round or two, and each costs every plan
FEW_PLANS_SPARES = 4  # under `few_plans` one for so many slots, if those are more: one plan is to last several rounds
GROUPS = 16  # that the suspects of a death are divided into: rounds alone are slow, and deaths slower


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


def choose_suspects(fleet: Fleet, name: str) -> list[Entry] | None:
    """The requests that the worker runs if it is quarantined, or is to be from now on. None: it is like any other."""
    isolation = fleet.isolation
    if not isolation.suspects:
        return None
    worker = fleet.workers[name]
    suspects = isolation.quarantined(worker)
    if not suspects and quarantine_due(fleet) and name == hungriest(fleet):
        suspects = _next_group(fleet, worker)
        for entry in suspects:
            fleet.place(entry, name)
        worker.quarantined = tuple(entry.request.id for entry in suspects)
    if suspects and not worker.listed.keys() <= set(worker.quarantined):
        return []  # first what may still be under way there must end
    return suspects or None


def quarantine_due(fleet: Fleet) -> bool:
    """Whether a worker is to be quarantined: one at a time, so that the others serve the requests that nobody
    suspects."""
    isolation = fleet.isolation
    return isolation.waiting > 0 and not any(map(isolation.quarantined, fleet.workers.values()))


def _next_group(fleet: Fleet, worker: Worker) -> list[Entry]:
    """The suspects that go next: the first of those that wait, and some that were suspected with it."""
    suspects = [one for one in fleet.isolation.suspects.values() if one.home is None and worker.holds(one)]
    if not suspects:
        return []
    waiting = sorted(suspects, key=lambda entry: entry.key)
    crowd = waiting[0].crowd
    return [entry for entry in waiting if entry.crowd == crowd][: min(worker.up.slots, -(-crowd // GROUPS))]


def hungriest(fleet: Fleet) -> str | None:
    """The worker that a new request is best offered to first: the one with most vacant slots."""
    for name in fleet.vacancies.most():
        worker = fleet.workers[name]
        if not worker.draining and not (worker.quarantined and fleet.isolation.quarantined(worker)):
            return name
    return None


def called_for(fleet: Fleet, id: str) -> str | None:
    """The worker that should plan at once since this request has come: the hungriest one, if the newcomer is to run
    there next or spares are missing. Else the plan that answers that worker's next report is early enough."""
    if (name := hungriest(fleet)) is None:
        return None
    worker = fleet.workers[name]
    spared = len(worker.ranking) >= most_listed(fleet, worker)
    last = worker.ranking.at(worker.up.slots - 1) if spared else None  # of those that run next
    return None if last is not None and last < fleet.entries[id].key else name


def idle_beside_work(fleet: Fleet) -> str | None:
    """A worker with a vacant slot, if it could claim a request that waits elsewhere: it should plan."""
    if not fleet.vacancies.any:
        return None
    name = hungriest(fleet)
    if name is None or fleet.workers[name].vacancy <= 0:
        return None
    offered = len(fleet.unplaced) > fleet.isolation.waiting or quarantine_due(fleet)
    return name if offered or claimable(fleet, name, []) else None


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
    one without KV there, or one whose KV is computed anew here before the other worker has room for it.
    """
    worker = fleet.workers[name]
    idle = len(batch) < worker.up.slots
    best = None
    # Where there are suspects a worker may be quarantined, however many requests it has.
    for other in fleet.workers if fleet.isolation.suspects else fleet.vacancies.short():
        donor = fleet.workers[other]
        # The slots of a quarantined worker are not for its other requests.
        quarantined = bool(donor.quarantined and fleet.isolation.quarantined(donor))
        if other == name or (donor.vacancy >= 0 and not quarantined):
            continue
        slots = 0 if quarantined else donor.up.slots
        next_key = donor.ranking.at(slots)
        if next_key is None or not (idle or next_key < batch[-1].key):
            continue
        for key in donor.ranking.beyond(slots):
            entry = fleet.entries[key[-1]]
            if (best and key >= best.key) or not (idle or key < batch[-1].key):
                break
            with_kv = entry.blocks or entry.offloaded
            if (with_kv and not idle) or entry.state is State.RUNNING or entry.probation:
                continue
            rebuild_s = entry.tokens * worker.up.cost.prefill_token_s
            if (not with_kv or rebuild_s < _next_end_s(fleet, donor)) and worker.holds(entry):
                best = entry
                break
    return best


def _next_end_s(fleet: Fleet, worker: Worker) -> float:
    """Seconds until the first of those that go first there is believed to end."""
    first = (fleet.entries[key[-1]] for key in worker.ranking.first(worker.up.slots))
    return min(map(fleet.believed_rounds, first)) * worker.up.cost.round_s(fleet.draft_len, worker.up.slots)
