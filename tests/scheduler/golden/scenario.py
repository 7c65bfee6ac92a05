"""A seeded world around the core: requests of several tenants and classes, workers without a model, and mishaps.

Everything is drawn from one seeded generator, so equal code gives equal lines to the digit.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from random import Random

from scheduler_service.core.beliefs import Expected, Length
from scheduler_service.core.costs import CostProfile
from scheduler_service.core.events import (
    Cancelled,
    CostChanged,
    Draining,
    Event,
    Held,
    Obeyed,
    Round,
    StepDone,
    Submitted,
    Tick,
    WorkerDown,
    WorkerUp,
)
from scheduler_service.core.terms import Terms
from scheduler_service.core.types import (
    UNBOUNDED,
    Bounds,
    Effect,
    Finish,
    Plan,
    QueueIsFull,
    Request,
    RequestClass,
    TooLate,
    Unseen,
)
from tests.scheduler.golden import adapter

COST = CostProfile(0.002, 0.03, 0.001, 0.0005, 0.001, 0.0002, 0.0001)
TERMS = {
    "gold": Terms(weight=4.0),
    "silver": Terms(weight=2.0, max_requests=60),
    "*": Terms(weight=1.0, max_tokens=40_000, best_class=RequestClass.DEFAULT),
}


@dataclass(frozen=True)
class Scenario:
    policy: str
    seed: int = 1
    events: int = 700
    workers: int = 2
    slots: int = 3
    blocks: int = 60  # of 16 tokens
    host_blocks: int = 20
    draft_len: int | None = 4
    lag: int = 0  # rounds between a plan and the round that carries it out
    tenants: tuple[str, ...] = ("gold", "silver", "tin", "lead")
    bounds: Bounds = UNBOUNDED
    at_first: int = 0  # requests that arrive at once before anything else
    mishaps: float = 1.0  # how often workers go and schedulers change, in proportion
    to_the_end: bool = True  # of all requests


@dataclass
class Kv:
    placement: int
    tokens: int = 0
    offloaded: int = 0  # tokens in the host's memory; none are in blocks then


@dataclass
class Machine:
    """A worker without a model: carries out its plan on requests whose outcome the world has drawn."""

    name: str
    slots: int
    blocks: int
    plan: Plan | None = None
    number: int = 0  # of that plan
    next_plan: tuple[Plan, int] | None = None
    plans: int = 0
    kv: dict[str, Kv] = field(default_factory=dict)
    draining: bool = False

    @property
    def free(self) -> int:
        return self.blocks - sum(-(-kv.tokens // 16) for kv in self.kv.values())


class World:
    def __init__(self, scenario: Scenario) -> None:
        self.is_ = scenario
        self.rng = Random(f"golden {scenario.seed} {scenario.policy}")
        self.now = 1000.0
        self.lines: list[tuple[object, ...]] = []
        self.counts: Counter[str] = Counter()
        self.lengths: dict[str, int] = {}
        self.chances: dict[str, float] = {}
        self.poison: dict[str, int] = {}  # output tokens at which a request kills its worker
        self.up: dict[str, Machine] = {}
        self.last: StepDone | None = None
        self.core = self._new_core()
        for number in range(scenario.workers):
            self._attach(f"w{number}")
        for _ in range(scenario.at_first):
            self._submit()

    def run(self) -> None:
        for _ in range(self.is_.events):
            self._event()
        for _ in range(20 * self.is_.events if self.is_.to_the_end else 0):
            if not adapter.entries(self.core):
                break
            while len(self.up) < self.is_.workers:
                self._arrives()
            self.now += 0.01
            self._step(self.rng.choice(sorted(self.up)))
        self.lines.append(("left", sorted(adapter.entries(self.core))))

    # ---- what happens ----

    def _event(self) -> None:
        self.now += self.rng.expovariate(30)
        drawn, mishaps = self.rng.random(), self.is_.mishaps
        if drawn < 0.25:
            self._submit()
        elif drawn < 0.85:
            if self.up:
                self._step(self.rng.choice(sorted(self.up)))
        elif drawn < 0.88:
            if live := sorted(adapter.entries(self.core)):
                self._observe(Cancelled(self.rng.choice(live)))
        elif drawn < 0.91:
            self._observe(Tick())
        elif drawn < 0.93:
            live = sorted(adapter.entries(self.core))
            self.lines.append(("standing", *adapter.standing(self.core, self.rng.sample(live, min(3, len(live))))))
        elif drawn < 0.94:
            if self.up:
                scale = self.rng.choice([0.5, 1.0, 2.0])
                cost = replace(COST, draft_s=COST.draft_s * scale, prefill_token_s=COST.prefill_token_s * scale)
                self._observe(CostChanged(self.rng.choice(sorted(self.up)), cost))
        elif drawn < 0.95:
            if self.last is not None and self.last.worker in self.up:
                self._observe(self.last)  # a stale report
        elif drawn < 0.95 + 0.05 * mishaps:
            self._mishap()

    def _mishap(self) -> None:
        drawn = self.rng.random()
        if len(self.up) < self.is_.workers:
            self._arrives()
        elif drawn < 0.3:
            name = self.rng.choice(sorted(self.up))
            self._dies(name)
        elif drawn < 0.5:  # the link is cut, and the worker comes back with what it holds
            machine = self.up.pop(self.rng.choice(sorted(self.up)))
            if self.rng.random() < 0.5:
                self._observe(WorkerDown(machine.name, died=True))
            self._attach(machine.name, machine)
        elif drawn < 0.7:
            name = self.rng.choice(sorted(self.up))
            self.up[name].draining = True
            self._observe(Draining(name))
        elif drawn < 0.85:
            name = self.rng.choice(sorted(self.up))
            del self.up[name]
            self._observe(WorkerDown(name))
        else:
            self._new_leader()

    def _submit(self) -> None:
        rng, number = self.rng, len(self.lengths)
        id = f"r{number:05d}"
        most = rng.choice([20, 60, 150, 300])
        length = min(most, 1 + int(rng.expovariate(1 / 50)))
        self.lengths[id] = length
        self.chances[id] = rng.uniform(0.1, 0.95)
        if rng.random() < 0.01 * self.is_.mishaps:
            self.poison[id] = rng.randrange(length)
        hint = max(1, int(length * rng.lognormvariate(0, 0.5))) if rng.random() < 0.5 else None
        expected = None
        if rng.random() < 0.4:
            told = Length(round(rng.uniform(2, 6), 3), round(rng.uniform(0.1, 1.0), 3))
            expected = Expected(rng.choice([told, None]), rng.choice([round(rng.uniform(0.2, 0.9), 3), None]))
        klass = rng.choices(list(RequestClass), [1, 3, 1])[0]
        deadline = self.now + rng.choice([rng.uniform(0, 0.5), rng.uniform(0.5, 20)]) if rng.random() < 0.2 else None
        tenant = rng.choice(self.is_.tenants)
        request = Request(id, self.now, 1 + int(rng.expovariate(1 / 60)), most, klass, deadline, hint, expected, tenant)
        try:
            self._observe(Submitted(request))
        except (QueueIsFull, TooLate) as error:
            self.counts[type(error).__name__] += 1
            self.lines.append(("refused", id, type(error).__name__, str(error), f"{getattr(error, 'room_s', 0):.9g}"))
        else:
            if (name := adapter.worker_to_plan_for(self.core, id)) is not None:
                self.lines.append(("called", name))
                self._plan(name)

    def _arrives(self) -> None:
        names = (f"w{number}" for number in range(self.is_.workers))
        self._attach(next(name for name in names if name not in self.up))

    def _attach(self, name: str, old: Machine | None = None) -> None:
        is_ = self.is_
        index = int(name[1:])
        slots, blocks = max(1, is_.slots - index % 2), is_.blocks - 8 * (index % 3)
        self.up[name] = machine = Machine(name, slots, blocks, kv=old.kv if old else {})
        held = tuple(
            Held(
                id,
                kv.placement,
                -(-kv.tokens // 16),
                -(-kv.offloaded // 16),
                self._owed(id, kv),
            )
            for id, kv in machine.kv.items()
        )
        self._observe(WorkerUp(name, slots, blocks, 16, 8, COST, held, is_.host_blocks))

    def _owed(self, id: str, kv: Kv) -> int:
        entry = adapter.entries(self.core).get(id)
        return max(0, entry.tokens - kv.tokens - kv.offloaded) if entry else 0

    def _dies(self, name: str) -> None:
        del self.up[name]
        self.counts["deaths"] += 1
        self._observe(WorkerDown(name, died=True))

    def _new_core(self) -> "adapter.Core":
        is_ = self.is_
        core = adapter.make_core(is_.policy, is_.draft_len, 64, is_.bounds, 2)
        if len(is_.tenants) > 1:
            adapter.set_terms(core, TERMS)
        return core

    def _new_leader(self) -> None:
        """Another scheduler takes over: it has the records, and workers tell it what they hold."""
        old, records = self.core, adapter.records(self.core)
        self.core = self._new_core()
        adapter.teach(old, self.core)
        half = len(records) // 2
        self.core.restore(records[:half])
        adapter.set_unseen(self.core, Unseen(len(records) - half, 300 * (len(records) - half)))
        machines, self.up = self.up, {}
        for name, machine in sorted(machines.items()):
            self._attach(name, machine)
        self.core.restore(records[half:])
        adapter.set_unseen(self.core, Unseen())

    # ---- workers ----

    def _step(self, name: str) -> None:
        machine = self.up[name]
        if not self.is_.lag or machine.plan is None:
            self._plan(name)
        if (step := self._round(machine)) is None:
            self._plan(name)
            if name in self.up and machine.plan and not adapter.schedule(machine.plan):
                self._observe(Obeyed(name, machine.number, machine.free))
            return
        if step is DEAD:
            self._dies(name)
            return
        self.last = step
        self._observe(step)
        if self.is_.lag:
            self._plan(name)
        if (idle := adapter.idle_worker(self.core)) is not None and idle != name:
            self.lines.append(("idle", idle))
            self._plan(idle)

    def _plan(self, name: str) -> None:
        machine = self.up[name]
        plan = self.core.plan(name)
        machine.plans += 1
        self.counts["plans"] += 1
        self.lines.append(("plan", name, *adapter.plan_line(plan)))
        if self.is_.lag and machine.plan is not None:
            if machine.next_plan is not None:
                self._take(machine, *machine.next_plan)
            machine.next_plan = plan, machine.plans
        else:
            self._take(machine, plan, machine.plans)

    def _take(self, machine: Machine, plan: Plan, number: int) -> None:
        """This plan stands from now on."""
        machine.plan, machine.number = plan, number
        _, drop, offload, forget = adapter.plan_line(plan)
        for id in (*_ids(drop), *_ids(forget)):
            machine.kv.pop(id, None)
        for id in _ids(offload):
            if kv := machine.kv.get(id):
                machine.kv[id] = Kv(kv.placement, 0, kv.tokens)

    def _round(self, machine: Machine) -> StepDone | None:
        if machine.next_plan is not None and self.is_.lag:
            self._take(machine, *machine.next_plan)
            machine.next_plan = None
        rows: list[Round] = []
        ran = 0
        for id, placement, draft_len, prefill in adapter.schedule(machine.plan) if machine.plan else ():
            if (entry := adapter.entries(self.core).get(id)) is None or entry.home != machine.name:
                continue
            if entry.emitted >= self.poison.get(id, 10**9):
                return DEAD
            rows.append(self._row(machine, id, placement, draft_len, prefill, entry.emitted, entry.tokens))
            ran += not rows[-1].skipped
            if ran == machine.slots:
                break
        for row in rows:
            if row.finish:
                del machine.kv[row.id]
        if not rows:
            return None
        plan = machine.number if self.rng.random() < 0.9 else None
        return StepDone(machine.name, tuple(rows), machine.free, 0.03 + 0.001 * ran, plan)

    def _row(
        self, machine: Machine, id: str, placement: int, draft_len: int, prefill: int, start: int, tokens: int
    ) -> Round:
        kv = machine.kv.get(id)
        if kv is None or kv.placement != placement:
            kv = machine.kv[id] = Kv(placement, 0, kv.offloaded if kv else 0)
        owed = max(0, tokens - kv.tokens - kv.offloaded)
        computed = min(owed, prefill)
        new = drafts = accepted = 0
        finish = None
        if owed == computed:
            drafts = draft_len
            while accepted < drafts and self.rng.random() < self.chances[id]:
                accepted += 1
            new = accepted + 1
            if start + new >= self.lengths[id]:
                new = self.lengths[id] - start
                accepted = min(accepted, new)
                finish = self.rng.choice([Finish.LENGTH, Finish.STOP])
                if self.rng.random() < 0.02:
                    finish = Finish.ERROR
        after = kv.tokens + kv.offloaded + computed + new
        if -(-after // 16) - -(-kv.tokens // 16) > machine.free:
            return Round(id, placement, start, 0, 0, 0, 0, owed, -(-kv.tokens // 16), None, True)
        kv.tokens, kv.offloaded = after, 0
        return Round(id, placement, start, new, drafts, accepted, computed, owed - computed, -(-after // 16), finish)

    # ---- what the core says ----

    def _observe(self, event: Event) -> tuple[Effect, ...]:
        effects = self.core.observe(event, self.now)
        starts = {row.id: row.start for row in event.rounds} if isinstance(event, StepDone) else {}
        for line in adapter.effect_lines(self.core, effects, starts):
            self.counts["effects"] += 1
            self.lines.append(line)
        for _, state in adapter.ended(effects):
            self.counts[state] += 1
        return effects


DEAD = StepDone("", (), 0, 0.0)


def _ids(ids: object) -> Iterable[str]:
    assert isinstance(ids, tuple)
    return ids
