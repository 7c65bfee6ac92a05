"""The scheduling core: observe events, plan rounds. The live service and the simulator are two shells around it.

`observe` folds an event into the state and says what came of it; `plan` says what a worker shall run. Both are
deterministic: equal inputs give equal plans. Nothing here waits, reads a clock or speaks to anybody.
"""

from collections.abc import Iterable, Set
from dataclasses import replace

from scheduler_service.core import admission, backlog
from scheduler_service.core.charges import charge
from scheduler_service.core.draft import REFERENCE
from scheduler_service.core.entry import Entry
from scheduler_service.core.fleet import Fleet
from scheduler_service.core.lifecycle import Move, State
from scheduler_service.core.plan import make_plan
from scheduler_service.core.policies import Policy
from scheduler_service.core.types import (
    UNBOUNDED,
    Advanced,
    AlreadySubmitted,
    Bounds,
    Cancelled,
    Changed,
    CostChanged,
    Draining,
    Effect,
    Ended,
    Event,
    Finish,
    Obeyed,
    Plan,
    Record,
    Request,
    Round,
    StepDone,
    Submitted,
    Tick,
    WorkerDown,
    WorkerUp,
)


class Core:
    """`draft_len`: tokens proposed in a round; None: as many as pay. `prefill_chunk`: prompt tokens computed in one.
    `bounds`: what may be live. `max_deaths`: workers that may die while a request runs there alone, until it is
    ended."""

    def __init__(
        self,
        policy: Policy,
        *,
        draft_len: int | None = 4,
        prefill_chunk: int = 256,
        bounds: Bounds = UNBOUNDED,
        max_deaths: int = 3,
    ) -> None:
        self.fleet = Fleet(policy, REFERENCE if draft_len is None else draft_len, bounds, max_deaths)
        self._choose_drafts = draft_len is None
        self._prefill_chunk = prefill_chunk

    def plan(self, name: str) -> Plan:
        """What that worker shall run from now on."""
        return make_plan(self.fleet, name, choose_drafts=self._choose_drafts, prefill_chunk=self._prefill_chunk)

    def restore(self, records: Iterable[Record]) -> None:
        """Live requests that an earlier scheduler has left."""
        for record in records:
            self._add(self.fleet.prepare(Entry.restored(record, self.fleet.known)))

    def observe(self, event: Event, now: float) -> tuple[Effect, ...]:
        """Fold `event`. Raises QueueIsFull, TooLate, AlreadySubmitted or IllegalMove, and then nothing has changed."""
        fleet = self.fleet
        match event:
            case StepDone():
                return self._step_done(event, now)
            case Submitted(request):
                return self._submitted(request, now)
            case Cancelled(id):
                entry = fleet.entries.get(id)
                return (self._end(entry, Move.CANCEL, None),) if entry else ()
            case WorkerUp():
                return self._worker_up(event)
            case WorkerDown(name, died):
                return self._worker_down(name, died)
            case Obeyed(name, plan, free_blocks):
                worker = fleet.workers[name]
                worker.obeyed(plan)
                worker.free_blocks = worker.free_blocks if free_blocks is None else free_blocks
                return ()
            case Draining(name):
                worker = fleet.workers[name]
                worker.draining = True
                return self._displace(entry for entry in fleet.homed(worker) if entry.state is not State.RUNNING)
            case CostChanged(name, cost):
                fleet.workers[name].up = replace(fleet.workers[name].up, cost=cost)
                fleet.staff()
                return ()
            case Tick():
                return tuple(self._end(entry, Move.EXPIRE, None) for entry in fleet.deadlines.passed(now))

    # ---- requests come and go ----

    def _submitted(self, request: Request, now: float) -> tuple[Effect, ...]:
        fleet = self.fleet
        if request.id in fleet.entries:
            raise AlreadySubmitted(request.id)
        request = fleet.tenants.admit(request, fleet.unseen, backlog.request_s(fleet))
        entry = fleet.prepare(Entry(request, fleet.known))
        admission.check(fleet, entry, now)
        self._add(entry)
        return (Changed(entry.record()),)

    def _add(self, entry: Entry) -> None:
        fleet = self.fleet
        fleet.add(entry)
        if fleet.overtaking:
            fleet.overtaking.arrived(entry.request, fleet.believed_rounds(entry), backlog.busy_rounds(fleet))

    def _end(self, entry: Entry, move: Move, finish: Finish | None, start: int | None = None) -> Ended:
        entry.move(move)
        self.fleet.remove(entry)
        return Ended(entry.record(), finish, start)

    # ---- workers come and go ----

    def _worker_up(self, up: WorkerUp) -> tuple[Effect, ...]:
        fleet = self.fleet
        lost = self._worker_down(up.worker, died=not up.held)
        fleet.isolation.acquit(up.held)
        worker = fleet.attach(up)
        for held in up.held:
            entry = fleet.entries.get(held.id)
            worker.to_forget[held.id] = None
            # A later placement than is known: the leader that made it died before it wrote that down.
            if entry and entry.home is None and not entry.probation and entry.placement <= held.placement:
                entry.placement = held.placement
                entry.blocks, entry.offloaded, entry.prefill_owed = held.blocks, held.offloaded, held.prefill_owed
                fleet.place(entry, up.worker, move=False)
                worker.free_blocks -= entry.blocks
        return lost

    def _worker_down(self, name: str, died: bool) -> tuple[Effect, ...]:
        fleet = self.fleet
        if (worker := fleet.workers.get(name)) is None:
            return ()
        accused = fleet.isolation.accuse(worker, fleet.entries) if died else set()
        effects = self._displace(fleet.homed(worker), accused)
        fleet.detach(name)
        return effects

    def _displace(self, entries: Iterable[Entry], accused: Set[Entry] = frozenset()) -> tuple[Effect, ...]:
        """These requests have no worker any more, and no KV. The `accused` may have killed it."""
        effects: list[Effect] = []
        for entry in entries:
            waited = entry.state is State.WAITING
            self.fleet.displace(entry)
            if entry in accused and self.fleet.isolation.is_guilty(entry):
                effects.append(self._end(entry, Move.FAIL, None))
            elif not waited or entry in accused:
                # A request that only waited writes nothing: workers may come and go while the store is away.
                effects.append(Changed(entry.record()))
        return tuple(effects)

    # ---- rounds ----

    def _step_done(self, step: StepDone, now: float) -> tuple[Effect, ...]:
        fleet, known = self.fleet, self.fleet.known
        worker = fleet.workers[step.worker]
        worker.free_blocks = step.free_blocks
        fleet.load.step_done(worker, step, fleet.draft_len, now)
        worker.obeyed(worker.planned if step.plan is None else step.plan)
        effects: list[Effect] = []
        ran: dict[str, tuple[Entry, Round]] = {}
        stopped: set[str] = set()
        for row in step.rounds:
            entry = fleet.entries.get(row.id)
            if not entry or (entry.home, entry.placement, entry.emitted) != (step.worker, row.placement, row.start):
                continue  # stale: it was moved, ended, or its worker ran ahead of what is durable
            entry.blocks = row.blocks
            entry.prefill_owed = row.prefill_owed
            if row.count:
                entry.offloaded = 0
                ran[row.id] = entry, row
            if row.skipped:
                stopped.add(row.id)
        if not step.partial:
            stopped |= worker.running - ran.keys()
        beside = [id for id in worker.running - ran.keys() if fleet.runs_on(worker, id)] if step.partial else []
        if fleet.overtaking:
            served = [(entry.request, fleet.load.rounds(id), row.count) for id, (entry, row) in ran.items()]
            fleet.overtaking.served(served, [fleet.entries[id].request for id in beside])
        charge(fleet.classes, ran.values(), known.round_s / known.slots, known.cost.prefill_token_s)
        for entry, row in ran.values():
            effects.append(self._round_done(entry, row, now - step.duration_s))
        for id in sorted(stopped):
            if fleet.runs_on(worker, id):
                entry = fleet.entries[id]
                entry.move(Move.PREEMPT)
                entry.preemptions += 1
                fleet.rank(entry)
                effects.append(Changed(entry.record()))
        live = fleet.entries
        worker.running = {id for id in (*ran, *beside) if id in live and live[id].state is State.RUNNING}
        if fleet.overtaking:
            for entry in [fleet.entries[id] for id in fleet.overtaking.overdue()]:
                entry.overdue = True
                fleet.rank(entry)
        return tuple(effects)

    def _round_done(self, entry: Entry, row: Round, began: float) -> Effect:
        fleet, known = self.fleet, self.fleet.known
        if entry.state is not State.RUNNING:
            entry.move(Move.RUN)
        if entry.started is None:
            entry.started = began
        entry.emitted += row.new
        entry.expect()
        if row.finish:
            fleet.workers[entry.home or ""].listed.pop(row.id, None)
        entry.prefilled = min(entry.request.prompt_tokens, entry.prefilled + row.prefilled)
        if row.prefilled:  # the whole batch waits for it, and it may take rounds of a slot
            batch_s = row.prefilled * known.cost.prefill_token_s * known.slots + (0 if row.new else known.round_s)
            entry.kv_s += batch_s
        else:
            entry.served_s += known.round_s * row.count
        for count, (new, drafted, accepted) in enumerate(row.each or ((row.new, row.drafted, row.accepted),), 1):
            if new:
                fleet.isolation.served(entry)
            if drafted or (new and not row.prefilled):
                entry.acceptance = entry.acceptance.after(drafted, accepted, new)
            if count < row.count:
                entry.perceptible = entry.perceptible or fleet.policy.perceives(entry)
        if row.finish is Finish.ERROR:
            return self._end(entry, Move.FAIL, row.finish, row.start)
        if row.finish is not None:
            ended = self._end(entry, Move.FINISH, row.finish, row.start)
            self._learn(entry, cut=ended.cut)
            return ended
        entry.perceptible = entry.perceptible or fleet.policy.perceives(entry)
        fleet.rank(entry)
        return Advanced(entry.record(), row.start)

    def _learn(self, entry: Entry, *, cut: bool) -> None:
        known = self.fleet.known
        known.length.observe(entry.emitted, entry.request.predicted_tokens, cut=cut)
        known.acceptance.observe(entry.acceptance)
        if self.fleet.policy.learns:
            self.fleet.refit.learned(known.length, known.acceptance)
