"""The lean loop: a worker's rounds without a report and a plan for each of them. It decides what the core would decide.

A plan changes when a request comes or ends, when one that waits gets a better claim than one that runs, or when memory
becomes short. Between these moments rounds only pass. So the loop looks for the next of them: ends are read off courses
(course.py), changes of the order are foreseen (foresight.py). At these moments it does to the core's own state
what `observe` and `plan` would do: orders, lessons and accounts are the core's.

It runs one worker with fixed draft lengths, for requests of one class and tenant, while memory is enough for all that a
plan lists. In every other case it gives the round back, to be reported and planned as any other.
"""

from bisect import bisect_left, bisect_right
from itertools import accumulate, repeat
from math import inf
from operator import itemgetter, sub

from scheduler_service.core.core import Core
from scheduler_service.core.entry import Entry
from scheduler_service.core.events import Round
from scheduler_service.core.lifecycle import Move, State
from scheduler_service.core.placement import most_listed
from scheduler_service.core.ranking import Key
from scheduler_service.core.steps import finish
from scheduler_service.core.types import Ended, Finish
from scheduler_service.sim.accounts import Accounts, Shell
from scheduler_service.sim.course import Course
from scheduler_service.sim.foresight import Foresight
from scheduler_service.sim.running import Lesson, Order, Running, order_of
from scheduler_service.sim.waiting import Waiting
from scheduler_service.sim.worker import UNBOUNDED, SimFleet, SimWorker

MOST_SKIPPED = 15  # boundaries between rounds


class Lean:
    """The loop for one worker of a simulation. `like`: what the worker is like."""

    def __init__(self, shell: Shell, core: Core, sim_worker: SimWorker, like: SimFleet) -> None:
        fleet = core.fleet
        self._shell, self._sim_worker, self._costs = shell, sim_worker, like.costs
        self._fleet, self._worker = fleet, fleet.workers[sim_worker.name]
        self._policy, self._overtaking = fleet.policy, fleet.overtaking
        self._spares = most_listed(fleet, self._worker) - like.slots
        self._slots, self._draft_len = like.slots, min(fleet.draft_len, like.max_draft)
        self._accounts = Accounts(shell, fleet, self._worker, sim_worker)
        self._hindsight = self._accounts.hindsight
        self._foresight = Foresight(fleet, self._accounts)
        self._waiting = Waiting(shell, self._accounts, fleet, sim_worker, like)
        self._bounded = like.kv_budget_tokens < UNBOUNDED
        self._courses: dict[str, Course] = {}
        self._runs = self._accounts.runs
        self._starting: list[Running] = []  # those of them that begin with the next round, or come back
        self._stopped: list[Entry] = []  # those that no longer run in it
        self._decided = False
        self._come = True  # somebody, since it was looked whether this loop may run
        self._entered = self._skips = self._skipped = 0  # after which round; and boundaries at which it is not tried
        self._moved = True  # whether anybody may stand elsewhere in the order than when it was last looked at
        self._rivals: list[Key] = []  # those that may go before one that runs
        self._even = True  # whether they draft as much in every round
        self._next_end = self._due_at = inf  # rounds: of the next end, and when somebody may be overdue

    # ---- in and out ----

    def enter(self, now: float) -> bool:
        """Take over between two rounds. False: not as things are."""
        fleet, worker = self._fleet, self._worker
        if self._skipped < self._skips:
            self._skipped += 1
            return False
        if not self._waiting.may_run():
            return False
        self._runs.clear()
        self._starting, self._stopped = [], []
        self._hindsight.begin()
        if len(self._courses) > 2 * len(fleet.entries) + 64:  # of requests that ended elsewhere
            self._courses = {id: course for id, course in self._courses.items() if id in fleet.entries}
        for id in worker.running:
            entry = fleet.entries[id]
            if entry.prefill_owed or not self._waiting.settled(entry) or not self._sim_worker.holds_all(entry):
                return False
            self._runs[id] = self._running(entry)
        self._entered, self._skipped = self._accounts.round, 0
        self._accounts.now, self._decided, self._come, self._moved = now, False, False, True
        return True

    @property
    def now(self) -> float:
        """When the last round ended."""
        return self._accounts.now

    def _running(self, entry: Entry) -> Running:
        id = entry.request.id
        course, place = self._courses.get(id), None
        if course is not None:
            place = course.place_of(entry)
        if course is None or place is None:
            job, keep_means = self._shell.job(id), self._policy.perceptive
            course = self._courses[id] = Course(job, entry, self._draft_len, keep_means=keep_means)
            place = 0
        return Running(entry, course, place, self._accounts.round, self._accounts.served)

    def settle(self) -> None:
        """All entries and accounts are as if every round had been reported."""
        self._accounts.settle()

    def _leave(self) -> None:
        if self._accounts.round > self._entered:
            self._skips = 0
        else:  # in vain, as it will be next time, where memory stays short
            self._skips = min(2 * self._skips + 1, MOST_SKIPPED)
        self.settle()
        self._worker.running = set(self._runs)
        self._sim_worker.ran_last(self._runs)

    # ---- rounds ----

    def run(self, until_s: float) -> bool:
        """All that happens by then, while it may run. True: the next round is to be planned and reported."""
        while True:
            if not self._decided:
                if not self._decide():
                    self._leave()
                    return True
                self._decided = True
            if not self._runs:
                if (next_s := self._shell.next_arrival_s()) > until_s or next_s == inf:
                    return False
                self._accounts.now, self._decided = next_s, False
                self._come = self._moved = True
                self._shell.arrive(next_s)
                continue
            if not (self._starting or self._stopped or self._come):
                passing = min(self._next_end - 1, self._foresight.check_at, self._due_at - 1) - self._accounts.round
                if passing > 0 and self._pass(int(passing), until_s):
                    self._decided = self._accounts.round < self._foresight.check_at
                    continue
            if not self._one_round(until_s):
                self.settle()
                return False
            self._decided = False

    def _pass(self, rounds: int, until_s: float) -> bool:
        """So many rounds in which nothing changes, or as many as end before the next arrival. False: not all."""
        runs, costs, next_s, now = self._runs.values(), self._costs, self._shell.next_arrival_s(), self._accounts.now
        size, first = len(runs), self._accounts.round
        most = int(min(rounds, (min(next_s, until_s) - now) / costs.step_s(0, size, 0, 0, 0) + 1))
        if self._even:
            step_s = costs.step_s(self._draft_len, size, size * (self._draft_len + 1), 0, 0)
            ends_s = list(accumulate(repeat(step_s, most), initial=now))
        else:
            ends_s = [now]
            for round in range(first, first + most):
                drafts = [run.course.drafts(round - run.offset) for run in runs]
                ends_s.append(ends_s[-1] + costs.step_s(max(drafts), size, sum(drafts) + size, 0, 0))
        if ends_s[-1] >= next_s or ends_s[-1] > until_s:
            del ends_s[min(bisect_left(ends_s, next_s), bisect_right(ends_s, until_s)) :]
        done = len(ends_s) - 1
        if done > 0:
            self._accounts.now = ends_s[-1]
            longest_s = max(map(sub, ends_s[1:], ends_s))
            for run in runs:
                if longest_s > run.longest_s:
                    run.longest_s = longest_s
            self._shell.passed(ends_s, size)
            self._accounts.count(ends_s[1:], 0)
        return done == rounds

    def _one_round(self, until_s: float) -> bool:
        """A round in which something may change. False: it ends later."""
        began, round, runs = self._accounts.now, self._accounts.round, self._runs
        drafts = [self._draft_len] * len(runs)
        if not self._even:
            drafts = [run.course.drafts(round - run.offset) for run in runs.values()]
        prefilled = sum([run.entry.prefill_owed for run in self._starting])
        resumed = sum([run.entry.state is State.PAUSED for run in self._starting])
        step_s = self._costs.step_s(max(drafts), len(runs), sum(drafts) + len(runs), prefilled, resumed)
        ended_s = began + step_s
        while (next_s := self._shell.next_arrival_s()) <= ended_s:
            if next_s > until_s:
                return False
            self._accounts.prepare_for_arrivals()
            self._come = True
            self._shell.arrive(next_s)
        if ended_s > until_s:
            return False
        self._accounts.now, self._moved = ended_s, True
        if len(runs) > len(self._starting):
            self._shell.passed([began, ended_s], len(runs) - len(self._starting))
        for run in runs.values():
            if ended_s - began > run.longest_s and run not in self._starting:
                run.longest_s = ended_s - began
        self._accounts.count([ended_s], prefilled)
        if self._starting or self._stopped:
            self._accounts.charge()  # classes are charged by who waits
        for run in self._starting:
            self._accounts.start(run, ended_s - step_s)
        self._starting = []
        self._accounts.tell_served()
        ended = self._end() if self._accounts.round == self._next_end else []
        for entry in sorted(self._stopped, key=lambda entry: entry.request.id):
            entry.move(Move.PREEMPT)
            entry.preemptions += 1
            self._fleet.rank(entry)
        self._stopped = []
        if self._overtaking is not None and self._overtaking.is_due:
            self._accounts.let_pass(self._overtaking)
        for effect in ended:
            self._shell.ended(effect, ended_s)
        return True

    def _end(self) -> list[Ended]:
        """Some have ended with the last round, and teach, in the order of the plan before it."""
        hindsight, before = self._hindsight, self._accounts.round - 1
        self._accounts.charge()
        if self._policy.perceptive:
            for run in self._runs.values():
                hindsight.perceive(run, before)
        enders = [run for run in self._runs.values() if run.last_round == self._accounts.round]
        order: list[tuple[Order, Running]] = [((), enders[0])]
        if len(self._runs) > 1:
            order = sorted([(hindsight.order_at(run, before), run) for run in enders], key=itemgetter(0))
        ended, known = [], [hindsight.known_now()]
        for _, run in order:
            ended.append(self._finish(run))
            known.append(hindsight.known_now())
        if not hindsight.learned_in(before):
            hindsight.lessons.clear()
        hindsight.lessons.append(Lesson(self._accounts.round, [place for place, _ in order], known))
        self._foresight.learned(known)
        return ended

    def _finish(self, run: Running) -> Ended:
        entry, course, id = self._hindsight.show(run, self._accounts.round), run.course, run.entry.request.id
        self._accounts.tell_service(run)
        del self._runs[id], self._courses[id]
        self._sim_worker.forget(id)
        start, tokens = course.tokens[-2], course.tokens[-1]
        row = Round(id, entry.placement, start, tokens - start, 0, 0, 0, 0, 0, Finish.LENGTH)
        return finish(self._fleet, self._worker, entry, row)

    # ---- decisions ----

    def _decide(self) -> bool:
        """Decide which requests run next, and until when that is certain. False: only a real plan can tell."""
        fleet, runs, round, foresight = self._fleet, self._runs, self._accounts.round, self._foresight
        if fleet.refit.pending or (self._come and not self._waiting.may_run()):
            return False
        self._come = False
        if not self._moved and self._foresight.all_go_on(self._rivals) and not self._bounded:
            return True
        vacant, spares, foresight.check_at, self._due_at = self._slots - len(runs), self._spares, inf, inf
        waiting = self._waiting.best(vacant + spares) if len(fleet.entries) > len(runs) else []
        self._rivals = waiting[vacant:]
        displaced = foresight.displaced(self._rivals, all_of_them=len(waiting) < vacant + spares)
        if displaced is None:
            return False
        chosen = waiting[: vacant + len(displaced)]
        if not all(self._waiting.may_start(fleet.entries[key[-1]]) for key in chosen):
            return False
        for run in displaced:
            self._accounts.settle_one(run)
        listed = waiting
        if displaced:
            waiting = self._waiting.best(vacant + spares + len(displaced))
            listed = sorted([*waiting, *(run.entry.key for run in displaced)])
        if (rounds := self._waiting.fit(listed)) < 0:
            return False
        foresight.check_at = min(foresight.check_at, round + 1 + rounds)
        self._moved = bool(chosen)
        for run in displaced:
            del runs[run.entry.request.id]
            self._stopped.append(run.entry)
        for key in listed[: vacant + spares + len(displaced)]:
            if (entry := fleet.entries[key[-1]]).home is None:
                fleet.place(entry, self._worker.up.worker)
                foresight.check_at, self._moved = round + 1, True
        for key in chosen:
            run = runs[key[-1]] = self._running(fleet.entries[key[-1]])
            run.joins(round, order_of(key))
            self._starting.append(run)
        self._worker.to_forget.clear()
        self._even = all(run.course.even for run in runs.values())
        self._next_end = min([run.last_round for run in runs.values()], default=inf)
        if self._overtaking is not None and runs:
            self._accounts.tell_served()
            self._due_at = round + 1 + self._overtaking.rounds_until_due(self._accounts.one().request.klass, len(runs))
        return True
