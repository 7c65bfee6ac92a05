"""For how long a worker's plan stays what it is, whatever its rounds bring. Plans nothing.

Most rounds change nothing: those that run go on. Where that is certain beforehand, nobody has to plan between them. The
simulator asks; it knows that nothing else happens meanwhile. What is certain: the keys of those that wait stay as they
are, and a policy can tell how bad a claim may become in so many rounds (`Policy.worst`).
"""

from scheduler_service.core.entry import Entry, Worker
from scheduler_service.core.fleet import Fleet
from scheduler_service.core.lifecycle import State
from scheduler_service.core.placement import most_listed
from scheduler_service.core.ranking import Key

TRIED = (64, 32, 16, 8, 4, 2, 1)  # rounds


def lasting_rounds(fleet: Fleet, name: str, most: int) -> int:
    """After how many rounds, at most `most`, the worker's next plan would still run the requests that it runs now. All
    of them go on, and no other event comes. 0: that is not known.

    Looked at is only a worker that is alone, with requests of one class and tenant: then charges change no order."""
    worker = fleet.workers[name]
    if (
        len(fleet.workers) > 1
        or fleet.refit.pending
        or fleet.isolation.suspects
        or fleet.pauses
        or worker.draining
        or worker.up.cost.chains
        or len({name[-2:] for name in (*worker.ranking.groups, *fleet.unplaced.groups)}) != 1
    ):
        return 0
    keys = worker.ranking.first(most_listed(fleet, worker))
    count = len(worker.running)
    running = [fleet.entries[key[-1]] for key in keys[:count]]
    waiting = [fleet.entries[key[-1]] for key in keys[count:]]
    if not all(entry.request.id in worker.running and _goes_on(entry) for entry in running):
        return 0
    rival = min((key for key in (*keys[count : count + 1], fleet.unplaced.at(0)) if key is not None), default=None)
    if rival is not None and count < worker.up.slots:
        return 0
    if fleet.overtaking:
        most = min(most, fleet.overtaking.rounds_until_due(running[0].request.klass, count))
    for rounds in TRIED:
        stays = rounds <= most and _fits(worker, running, waiting, rounds)
        if stays and (rival is None or _stay_ahead(fleet, worker, running, rival, rounds)):
            return rounds
    return 0


def _goes_on(entry: Entry) -> bool:
    """Whether it decodes, and nothing but its claim decides where it stands."""
    settled = not (entry.due or entry.overdue or entry.probation)
    return settled and entry.state is State.RUNNING and entry.emitted > 0 and not entry.prefill_owed


def _fits(worker: Worker, running: list[Entry], waiting: list[Entry], rounds: int) -> bool:
    """Whether the plan after so many rounds finds memory for all that it lists (core/kv.py)."""
    needs = [worker.blocks_for(entry, rounds + 2) - entry.blocks for entry in running]
    needs += [worker.blocks_for(entry) - entry.blocks for entry in waiting]
    return sum(need for need in needs if need > 0) <= worker.free_blocks


def _stay_ahead(fleet: Fleet, worker: Worker, running: list[Entry], rival: Key, rounds: int) -> bool:
    """Whether after each of so many rounds all of them go before `rival`, the best of those that wait."""
    if rival[0] and not running[0].key[0]:
        return True  # without preemption those that have begun go first
    policy, round_s, tokens = fleet.policy, fleet.known.round_s, rounds * worker.round_tokens
    for entry in running:
        worst = policy.worst(entry, round_s, rounds, tokens)
        if worst is None or worst > rival[3:6]:  # if they are equal, the one that runs keeps its place
            return False
    return True
