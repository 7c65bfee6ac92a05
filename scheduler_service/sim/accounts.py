"""The core's accounts and the trace, told of the lean loop's rounds (lean.py). Decides nothing.

Most rounds only add to sums. An account is told of them when somebody is about to look at it.
"""

from math import inf
from typing import Protocol

from scheduler_service.core.charges import charge_one
from scheduler_service.core.entry import Entry, Worker
from scheduler_service.core.fleet import Fleet
from scheduler_service.core.lifecycle import Move
from scheduler_service.core.overtaking import Overtaking
from scheduler_service.core.types import Ended
from scheduler_service.sim.running import Hindsight, Running, order_of
from scheduler_service.sim.worker import UNBOUNDED, SimWorker
from scheduler_service.sim.workload import Job


class Shell(Protocol):
    """The simulation: what comes, and who notes what has happened."""

    several: bool  # whether there may be requests of several classes or tenants

    def job(self, id: str) -> Job: ...

    def next_arrival_s(self) -> float: ...

    def arrive(self, now: float) -> None:
        """Submit all that have come by then."""

    def delivered(self, id: str, now: float) -> None:
        """It has tokens now, after a pause or for the first time."""

    def passed(self, ends_s: list[float], requests: int) -> None:
        """So many requests had tokens at each of these times, the first of which is told already."""

    def left(self, id: str, now: float, longest_s: float, drafts: int) -> None:
        """It had tokens now, no longer than that apart, and so many of its rounds since that was told had drafts."""

    def ended(self, ended: Ended, now: float) -> None: ...


class Accounts:
    """`runs`: those that run, by id; the loop changes them. `round`, `now`: how many rounds there were, and when the
    last one ended."""

    def __init__(self, shell: Shell, fleet: Fleet, worker: Worker, sim_worker: SimWorker) -> None:
        self._shell, self._fleet, self._worker, self._sim_worker = shell, fleet, worker, sim_worker
        self._overtaking = fleet.overtaking
        self.hindsight = Hindsight(fleet)
        self.runs: dict[str, Running] = {}
        self.round, self.now = 0, 0.0
        self.served = 0  # request-rounds so far
        self._told = 0  # of them those that overtaking knows of
        self._uncharged: list[tuple[int, int, int]] = []  # rounds, and the request-rounds and prefill in each

    def settle(self) -> None:
        """All entries and accounts are as if every round had been reported."""
        for run in self.runs.values():
            self.settle_one(run)
        self.tell_served()
        self.charge()
        self._worker.free_blocks = self._sim_worker.free

    def settle_one(self, run: Running) -> None:
        round, entry, hindsight = self.round, run.entry, self.hindsight
        if round == run.joined:
            hindsight.show(run, round)
            return
        hindsight.perceive(run, round)
        self._tell_overtaking(run)
        hindsight.rank(run, round)
        self.tell_service(run)
        entry.blocks = entry.tokens
        self._sim_worker.has(entry)

    def one(self) -> Entry:
        """One of those that run: they are of one class and tenant."""
        return next(iter(self.runs.values())).entry

    def tell_service(self, run: Running) -> None:
        for _ in range(self.round - run.served_until):
            run.entry.served_s += self._fleet.known.round_s
        run.served_until = self.round
        drafting, place = run.course.drafting, self.round - run.offset
        self._shell.left(run.entry.request.id, self.now, run.longest_s, drafting[place] - drafting[run.told])
        run.told = place

    def _tell_overtaking(self, run: Running) -> None:
        """Tell that the request ran, and how long it was believed to need still when its last round began."""
        account, request = self._overtaking, run.entry.request
        if account is not None and self.round > run.joined:
            account.shared(request, self.served - run.shared)
            account.believed(request, self.hindsight.believed_rounds(run, self.round - 1))
        run.shared = self.served

    def tell_served(self) -> None:
        if self._overtaking is not None and self._told != self.served:
            self._overtaking.served_together(self.one().request.klass, self.served - self._told)
        self._told = self.served

    def charge(self) -> None:
        """Round by round where tenants or classes are compared by what they were charged, to the digit."""
        if not self._uncharged:
            return
        entry, known, one_by_one = self.one(), self._fleet.known, self._shell.several
        share_s, prefill_s = known.round_s / known.slots, known.cost.prefill_token_s
        for rounds, requests, prefilled in self._uncharged:
            service_s, times = requests * share_s + prefilled * prefill_s, rounds if one_by_one else 1
            for _ in range(times):
                charge_one(self._fleet.classes, entry.of_class, entry.flow, service_s * (rounds // times))
        self._uncharged.clear()

    def count(self, ends_s: list[float], prefilled: int) -> None:
        """Rounds ended then; `prefilled` tokens of prompts were computed in the first one."""
        size = len(self.runs)
        self.round += len(ends_s)
        self.served += size * len(ends_s)
        self._uncharged.append((len(ends_s), size, prefilled))
        self._fleet.load.rounds_done(self._worker, ends_s, size, size, prefilled, self._fleet.draft_len)

    def prepare_for_arrivals(self) -> None:
        """Leave the accounts as the last report would have: an arrival is about to look at them."""
        if self._fleet.bounds.backlog_s != inf or self._worker.memory_tokens < UNBOUNDED:
            self.settle()
            return
        self.tell_served()
        self.charge()
        for run in self.runs.values():
            self._tell_overtaking(run)
            self.hindsight.show(run, self.round)  # a policy may look at those that run

    def start(self, run: Running, began: float) -> None:
        """Its first round here is over."""
        entry, known = run.entry, self._fleet.known
        entry.move(Move.RUN)
        if entry.started is None:
            entry.started = began
        if owed := entry.prefill_owed:
            entry.prefilled = min(entry.request.prompt_tokens, entry.prefilled + owed)
            entry.kv_s += owed * known.cost.prefill_token_s * known.slots + known.round_s
            entry.prefill_owed = 0
            run.served_until += 1
        self._shell.delivered(entry.request.id, self.now)

    def let_pass(self, account: Overtaking) -> None:
        """Some may have been overtaken as often as the policy allows."""
        for run in self.runs.values():
            account.shared(run.entry.request, self.served - run.shared)
            run.shared = self.served
        for id in list(account.overdue()):
            entry, own = self._fleet.entries[id], self.runs.get(id)
            if own is not None:
                self.settle_one(own)
            entry.overdue = True
            self._fleet.rank(entry)
            if own is not None:
                own.joins(self.round, order_of(entry.key))
