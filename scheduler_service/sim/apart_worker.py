"""A worker without a model whose drafts are made elsewhere: it takes those that are there, waits while that pays, lets
those go first that are ready, and looks drafts up where there are none. It obeys; whose drafts those are is the core's
to say."""

from collections.abc import Mapping, Sequence
from random import Random

from scheduler_service.core.core import Core
from scheduler_service.core.costs import CostProfile
from scheduler_service.core.entry import Entry
from scheduler_service.core.events import Round
from scheduler_service.core.types import Run
from scheduler_service.sim.drafter import Apart, SimDrafter, Truth
from scheduler_service.sim.ready_first import ReadyFirst
from scheduler_service.sim.worker import SimFleet, SimWorker
from scheduler_service.sim.workload import Job

USABLE = 2  # drafts: fewer are waited for, and let others go first
LEARNS = 0.02  # weight of a round in what it has found
TELL_STEPS = 32  # as a real worker: at most once in so many steps,
TELL_CHANGE = 0.1  # and only of a change by this share


class ApartWorker(SimWorker):
    def __init__(self, name: str, core: Core, jobs: Mapping[str, Job], fleet: SimFleet) -> None:
        super().__init__(name, core, jobs, fleet)
        self._apart = fleet.apart or Apart()
        pass_s = fleet.costs.step_s(0, fleet.slots, fleet.slots, 0, 0)
        read_s = 1e-3 * fleet.costs.t_prefill_ms_per_token * min(1.0, 1e-3 * self._apart.supply_ms / pass_s)
        self._drafter, self._pass_s = SimDrafter(self._apart, pass_s, read_s), pass_s
        self._rule = ReadyFirst()
        self._truths: dict[str, Truth] = {}
        self._offers: dict[str, tuple[int, int]] = {}  # of this round: drafts that are there, and how many are right
        self._wishes: dict[str, int] = {}  # drafts that each request of the plan is to have; 0: from nowhere else
        self._asked: set[str] = set()  # those of this round that were to have drafts from elsewhere
        self._late: dict[str, bool] = {}
        self._hit, self._gain, self._fallback, self._rate, self._wait_s = 1.0, 2.0, 0.0, 0.0, 0.0
        self._told = self._hit, self._fallback, self._wait_s
        self._steps = 0
        self.waited_s = 0.0  # in all
        self.hits = self.asked = 0  # rounds

    def _arrange(self, listed: list[Run], now: float) -> tuple[float, list[Run]]:
        slots = self._fleet.slots
        self._wishes = {run.id: 0 if run.here or not self._apart.chains else run.draft_len for run in listed}
        drafting = [run for run in listed if self._wishes[run.id] and self._drafter.knows(run.id)]
        self._late = {}
        for run in drafting:
            if self._look(run, now)[0] < min(run.draft_len, USABLE):
                self._late[run.id] = self._drafter.due_s(run.id, now, USABLE) <= self._pass_s
        yields = {run.id for run in listed if run.yields}
        runs = {run.id: run for run in listed}
        order = self._rule.order(list(runs), slots, yields, self._late if yields else {})
        first = [runs[id] for id in order[:slots]]
        wait_s = self._best_wait_s([run for run in first if run.id in self._late], now) if self._apart.wait else 0.0
        self._offers = {run.id: self._look(run, now + wait_s) for run in drafting}
        self.waited_s += wait_s
        self._wait_s += LEARNS * (wait_s - self._wait_s)
        return wait_s, [runs[id] for id in order]

    def _look(self, run: Run, at: float) -> tuple[int, int]:
        return self._drafter.offer(run.id, self._core.fleet.entries[run.id].emitted, at)

    def _best_wait_s(self, late: Sequence[Run], now: float) -> float:
        """For as many of the late ones as pay with the tokens that they bring, at the present rate: half a pass at
        most."""
        best = best_s = 0.0
        for count, due_s in enumerate(sorted(max(0.0, self._drafter.due_s(run.id, now)) for run in late), 1):
            if due_s > self._pass_s / 2:
                break
            if (gain := count * max(0.0, self._gain - self._fallback) - self._rate * due_s) > best:
                best, best_s = gain, due_s
        return best_s

    def _drafts(self, run: Run, entry: Entry, prefilled: int) -> tuple[int, int]:
        if prefilled:
            return 0, 0  # as a real worker: the drafter has yet to hear of the first token
        if not self._apart.chains:
            return run.draft_len, self._truth(run.id).accepts(entry.emitted, run.draft_len)
        if not self._wishes[run.id]:
            return self._looked_up(run, entry)
        self._asked.add(run.id)
        drafts, right = self._offers.get(run.id, (0, 0))
        return (min(drafts, run.draft_len), min(right, run.draft_len)) if drafts else self._looked_up(run, entry)

    def _looked_up(self, run: Run, entry: Entry) -> tuple[int, int]:
        chance, found = self._apart.lookup, 0
        if not chance:
            return 0, 0
        rng = Random(f"lookup {run.id} {entry.emitted}")
        while found < run.draft_len and rng.random() < chance:
            found += 1
        return run.draft_len, found

    def _drafted_here(self, run: Run, row: Round) -> int:
        return 0 if self._apart.chains else row.drafted

    def _truth(self, id: str) -> Truth:
        if id not in self._truths:
            self._truths[id] = Truth(self._jobs[id], self._apart.second)
        return self._truths[id]

    def _deferred(self, listed: list[Run]) -> list[Round]:
        runs = {run.id: run for run in listed}
        rows = []
        for id in self._rule.ran(self._ran, runs):
            held, entry = self._held.get(id), self._core.fleet.entries[id]
            tokens = held.tokens if held else 0
            lacking = entry.prefill_owed
            rows.append(
                Round(id, runs[id].placement, entry.emitted, 0, 0, 0, 0, lacking, tokens, None, True, deferred=True)
            )
        return rows

    def _done(self, rows: Sequence[Round], at: float) -> None:
        tokens = 0
        for row in rows:
            tokens += row.new
            if row.id in self._asked and not row.skipped:
                self._learn(row, self._offers.get(row.id, (0, 0))[0] > 0)
        ran = [row for row in rows if row.new]
        if ran:
            self._rate += 0.1 * (tokens / self._pass_s - self._rate)
        self._asked.clear()
        for row in ran:
            entry = self._core.fleet.entries[row.id]
            if row.finish:
                self._drafter.forget(row.id)
                self._truths.pop(row.id, None)
                continue
            if not (self._wishes[row.id] or self._drafter.knows(row.id)):
                continue
            emitted = entry.emitted + row.new
            length = self._wishes[row.id]
            self._drafter.tell(row.id, self._truth(row.id), emitted, entry.tokens, length, at)

    def _learn(self, row: Round, hit: bool) -> None:
        self.asked += 1
        self.hits += hit
        self._hit += LEARNS * (hit - self._hit)
        if hit:
            self._gain += LEARNS * (row.accepted - self._gain)
        else:
            self._fallback += LEARNS * (row.accepted - self._fallback)

    def cost_told(self) -> CostProfile | None:
        self._steps += 1
        found = self._hit, self._fallback, self._wait_s
        pairs = zip(found, self._told, strict=True)
        changed = any(abs(now - told) > TELL_CHANGE * max(now, told) for now, told in pairs)
        if self._steps % TELL_STEPS or not changed:
            return None
        self._told = found
        return self._fleet.profile(*found)
