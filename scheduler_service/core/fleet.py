"""The state of the queue: live requests, workers, and where each request stands. Decides nothing."""

import math
from itertools import islice

from scheduler_service.core.classes import Classes
from scheduler_service.core.deadlines import Deadlines
from scheduler_service.core.entry import Entry, Worker
from scheduler_service.core.events import WorkerUp
from scheduler_service.core.fair_ranking import FairRanking
from scheduler_service.core.fairness import Tenants
from scheduler_service.core.isolation import Isolation
from scheduler_service.core.known import Known
from scheduler_service.core.lifecycle import Move, State
from scheduler_service.core.load import Load
from scheduler_service.core.overtaking import Overtaking
from scheduler_service.core.pauses import Pauses
from scheduler_service.core.policies import Claim, Policy
from scheduler_service.core.probed import MOST_KEPT, Kept, Reading, former
from scheduler_service.core.ranking import Changes, Key
from scheduler_service.core.refit import Refit
from scheduler_service.core.types import Bounds, Ended, Finish, Unseen
from scheduler_service.core.vacancies import Vacancies

KEPT_FREE = 0.5  # of a worker's memory: with less a newcomer counts as one of a crowd


class Fleet:
    """`draft_len`: drafts a round in which nominal seconds are counted. `bounds`, `max_deaths`: as in `Core`."""

    def __init__(self, policy: Policy, draft_len: int, bounds: Bounds, max_deaths: int) -> None:
        self.policy = policy
        self.draft_len = draft_len
        self.bounds = bounds
        self.few_plans = False  # a plan may have to last for several rounds
        self.plans_lag = False  # a worker goes on by its last plan before the answer to its report comes
        self.ready_first = False  # who waits for drafts from elsewhere lets others go first
        self.foresight = False  # nobody begins for whom memory will run out
        self.known = Known(draft_len)
        self.unseen = Unseen()
        self.entries: dict[str, Entry] = {}  # the live requests
        self.workers: dict[str, Worker] = {}
        self._changes = Changes()
        self.unplaced = FairRanking(self._changes)  # of the requests without a worker
        self.vacancies = Vacancies()
        self.slots = 0  # of all workers
        self.tenants = Tenants(self._changes)
        self.classes = Classes(self._changes)
        self.load = Load()
        self.isolation = Isolation(max_deaths)
        self.deadlines = Deadlines(self.entries)
        self.refit = Refit()
        self.overtaking = Overtaking(policy.overtaking_bound) if policy.overtaking_bound else None
        self.pauses = Pauses(policy.pause_bound_s) if policy.pause_bound_s else None
        self.largest = 0  # tokens: no live request may come to more
        self.staffed_at = -math.inf  # when a worker last came or went

    # ---- requests ----

    def prepare(self, entry: Entry) -> Entry:
        """Set all that the claim of a new request depends on. It is not live yet."""
        entry.tenant, entry.flow = self.tenants.find(entry.request.tenant), self.tenants.flow(entry.request)
        entry.of_class = self.classes.account(entry.request.klass)
        entry.draft_len = self.draft_len
        entry.live_per_slot = len(self.entries) / max(1, self.slots)
        entry.memory_short = not self._roomy(entry)
        self._expect(entry)
        if self.policy.perceptive and not entry.perceptible:
            entry.perceptible = self.policy.perceives(entry)
        return entry

    def _roomy(self, entry: Entry) -> bool:
        """Whether the worker that it is offered to first keeps a share of its memory free beside it. Else whoever is
        begun early takes the memory of those that run."""
        worker = next((one for one in map(self.workers.get, self.vacancies.most()) if one and not one.draining), None)
        return worker is None or worker.free_blocks - worker.blocks_for(entry) >= KEPT_FREE * worker.up.blocks

    def _expect(self, entry: Entry) -> None:
        """The present belief about its length. One that rests on a reading stands until the next reading."""
        if not entry.since:
            entry.expect(self.known.belief(entry.request).at_least(self.policy.surest))

    def read(self, entry: Entry, reading: Reading) -> None:
        """A probe has read what remains of its output."""
        usual = former(self.known.belief(entry.request), reading.after)
        kept = Kept(reading.after, usual, reading.location)
        if len(entry.readings) < MOST_KEPT:
            entry.readings.append(kept)
        if (length := self.known.probe.belief(kept)) is not None:
            entry.expect(length.at_least(self.policy.surest), since=reading.after)
        elif entry.since:  # readings are no longer believed
            entry.since = 0
            self._expect(entry)

    def add(self, entry: Entry) -> None:
        """It is live from now on: all that it may need is reserved until it ends."""
        self.entries[entry.request.id] = entry
        self.largest = max(self.largest, entry.request.most_tokens)
        entry.tenant, entry.flow = self.tenants.join(entry.request)
        entry.of_class.live += 1
        entry.count(entry.state, 1)
        self.load.reserve(entry, self.believed_rounds(entry))
        self.deadlines.add(entry)
        self.isolation.join(entry)
        if self.policy.learns and not entry.request.foreseen:
            self.refit.join(entry.request.id)
        if self.pauses and entry.emitted:
            self.pauses.began(entry.request.id)
        self.rank(entry)

    def end(
        self, entry: Entry, move: Move, finish: Finish | None = None, start: int | None = None, reason: str = ""
    ) -> Ended:
        """Its life ends with this `move`. The rest is as in `Ended`. Raises IllegalMove and changes nothing."""
        entry.move(move)
        self._leave(entry)
        del self.entries[entry.request.id]
        self.tenants.leave(entry.request)
        self.isolation.leave(entry)
        self.refit.leave(entry.request.id)
        self.deadlines.leave(entry)
        entry.of_class.leave()
        self.load.release(entry)
        if self.overtaking:
            self.overtaking.ended(entry.request)
        return Ended(entry.record(), finish, start, reason)

    def refit_some(self) -> None:
        """Some claims follow the costs, once there are any, and what finished requests taught. There are workers."""
        for id in self.refit.costless():
            entry = self.entries[id]
            entry.live_per_slot /= self.slots  # there was none
            self.rank(entry)
        for id in self.refit.due():
            self._expect(self.entries[id])
            self.rank(self.entries[id])

    def believed_rounds(self, entry: Entry) -> int:
        """That it still needs, by what is believed of its length given that it did not end yet."""
        return self.rounds_for(entry.remaining_tokens)

    def rounds_for(self, tokens: float) -> int:
        """As many as finished requests had for so much output."""
        return math.ceil(tokens / self.known.tokens_per_round)

    # ---- workers ----

    def attach(self, up: WorkerUp, now: float) -> Worker:
        if self.known.first_worker(up.cost, up.slots):
            self.refit.costs_came(self.entries)
        self.staffed_at = now
        worker = self.workers[up.worker] = Worker(up, up.blocks, FairRanking(self._changes))
        self.vacancies.set(up.worker, worker.vacancy)
        self.staff()
        return worker

    def forget(self) -> None:
        """Another model is served from now on. No worker is attached."""
        self.known.forget()
        self.refit.forget()

    def detach(self, name: str, now: float) -> None:
        """All its requests have been displaced."""
        del self.workers[name]
        self.vacancies.remove(name)
        self.staffed_at = now
        self.staff()

    def staff(self) -> None:
        """The workers, or what their rounds cost, have changed."""
        self.slots = sum(worker.up.slots for worker in self.workers.values())
        self.load.staff(self.workers.values(), self.draft_len)

    def homeless(self) -> list[Entry]:
        """Requests that no worker can hold. A worker that drains counts until it has gone: often one like it follows.
        There must be workers."""
        workers = self.workers.values()
        memory_tokens = max(worker.memory_tokens for worker in workers)
        if memory_tokens >= self.largest:
            return []
        large = [entry for entry in self.entries.values() if entry.request.most_tokens > memory_tokens]
        self.largest = max((entry.request.most_tokens for entry in large), default=memory_tokens)  # others have ended
        stopped = filter(self.has_stopped, large)
        return [entry for entry in stopped if not any(worker.holds(entry) for worker in workers)]

    def has_stopped(self, entry: Entry) -> bool:
        """Whether the request no longer runs. A worker that runs nobody reports no rows, so a request may have stopped
        that is still marked as running: it has once no plan that lists it is under way."""
        if entry.state is not State.RUNNING or entry.home is None:
            return True
        return entry.request.id not in self.workers[entry.home].listed

    @property
    def crowded(self) -> bool:
        """Whether any request waits for a slot."""
        return bool(self.unplaced) or self.vacancies.waiting

    def homed(self, worker: Worker) -> list[Entry]:
        """The requests whose home it is, best claim first."""
        return [self.entries[key[-1]] for key in worker.ranking]

    def runs_on(self, worker: Worker, id: str) -> bool:
        """Whether this request is live, and ran there in the worker's last round."""
        entry = self.entries.get(id)
        return entry is not None and entry.home == worker.up.worker and entry.state is State.RUNNING

    # ---- order ----

    def rankings(self) -> tuple[FairRanking, ...]:
        """Every live request is in one of them."""
        return (self.unplaced, *(worker.ranking for worker in self.workers.values()))

    def _ranking(self, entry: Entry) -> FairRanking:
        return self.unplaced if entry.home is None else self.workers[entry.home].ranking

    def rank(self, entry: Entry) -> None:
        """Put it where its claim belongs; called whenever anything that the claim depends on has changed."""
        self.load.update(entry, self.believed_rounds(entry))
        key = self.key(entry)
        if key == entry.key:
            return
        if entry.key:
            self._ranking(entry).move(entry.key, key)
        else:
            self._ranking(entry).add(key)
            self._count_vacancy(entry.home)
        entry.key = key

    def key(self, entry: Entry) -> Key:
        """Where it belongs among all others, by its class, flow and claim as they are now."""
        claim = self.policy.claim(entry, self.known.round_s)
        if claim.level != entry.claim.level:
            entry.changed = True
        entry.claim = claim
        # A running request keeps its place against an equal claim: only a strictly higher one preempts.
        waits = entry.state is not State.RUNNING
        # Without preemption requests that have begun go first. Not those that ran last: with plans a round late two
        # would run alternately.
        new = entry.started is None and not entry.given_slot and not self.policy.preemptive
        request = entry.request
        if entry.due:
            claim = Claim(1, -2, entry.last_token_s)
        elif entry.overdue:
            claim = Claim(1, -1, request.arrival)
        return (new, entry.of_class, entry.flow, *claim, waits, request.arrival, request.id)

    def give_slots(self, worker: Worker) -> None:
        """Those whom its last plan puts into its slots now may have begun before a report says so. Without preemption
        nobody goes before them any more."""
        if self.policy.preemptive or not self.plans_lag:
            return
        here = (entry for entry in map(self.entries.get, worker.order) if entry and entry.home == worker.up.worker)
        for entry in islice(here, worker.up.slots):
            if not entry.given_slot:
                entry.given_slot = True
                self.rank(entry)

    def place(self, entry: Entry, home: str, *, move: bool = True) -> None:
        """Make `home` its worker. With `move` its KV elsewhere is given up: what the old one reports is stale. KV of an
        earlier stay at `home` is not counted as its own, so the worker forgets it like that of any other request."""
        self._leave(entry)
        entry.home, entry.elsewhere, entry.hidden_s = home, False, 0.0
        if move:
            entry.given_slot = False
            entry.lose_kv()
            entry.next_placement()
        else:
            self.workers[home].to_forget.pop(entry.request.id, None)
        self.rank(entry)

    def displace(self, entry: Entry) -> None:
        """It has no worker any more, and no KV."""
        self._leave(entry)
        entry.home, entry.given_slot = None, False
        entry.lose_kv()
        self.rank(entry)

    def _leave(self, entry: Entry) -> None:
        """It is no longer where it was."""
        self._ranking(entry).remove(entry.key)
        entry.key = ()
        if entry.home is not None:
            self.workers[entry.home].to_forget[entry.request.id] = None
            self._count_vacancy(entry.home)

    def _count_vacancy(self, name: str | None) -> None:
        """The worker has one request more or less."""
        if name is not None:
            self.vacancies.set(name, self.workers[name].vacancy)
