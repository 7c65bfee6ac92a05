"""The scheduling core: observe events, plan rounds. The live service and the simulator are two shells around it.

`observe` folds an event into the state and says what came of it; `plan` says what a worker shall run. Both are
deterministic: equal inputs give equal plans. Nothing here waits, reads a clock or speaks to anybody.
"""

import math
from collections.abc import Iterable, Iterator, Set
from dataclasses import replace

from scheduler_service.core import admission, kv, placement
from scheduler_service.core.admission import UNBOUNDED, Bounds
from scheduler_service.core.beliefs import FleetAcceptance, FleetLength
from scheduler_service.core.charges import charge
from scheduler_service.core.classes import Classes
from scheduler_service.core.deadlines import Deadlines
from scheduler_service.core.draft import PROBE_ROUNDS, REFERENCE, choose_draft_lengths
from scheduler_service.core.entry import Entry, Worker
from scheduler_service.core.fairness import FairRanking, Tenants
from scheduler_service.core.isolation import Isolation
from scheduler_service.core.lifecycle import Move, State
from scheduler_service.core.load import Load
from scheduler_service.core.overtaking import Overtaking
from scheduler_service.core.policies import Claim, Policy
from scheduler_service.core.ranking import Key
from scheduler_service.core.refit import Refit
from scheduler_service.core.types import (
    Advanced,
    AlreadySubmitted,
    Cancelled,
    Changed,
    CostChanged,
    CostProfile,
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
    Run,
    StepDone,
    Submitted,
    Tick,
    Unseen,
    WorkerDown,
    WorkerUp,
)
from scheduler_service.core.views import EntryView


class Core:
    """`draft_len`: tokens proposed per round; None: as many as pay. `prefill_chunk`: prompt tokens computed in one.
    `max_deaths`: workers that may die while a request runs there alone, until it is ended."""

    def __init__(
        self,
        policy: Policy,
        *,
        draft_len: int | None = 4,
        prefill_chunk: int = 256,
        bounds: Bounds = UNBOUNDED,
        max_deaths: int = 3,
    ) -> None:
        self.policy = policy
        self.draft_len = REFERENCE if draft_len is None else draft_len
        self._adaptive = draft_len is None
        self.prefill_chunk = prefill_chunk
        self.bounds = bounds
        self.entries: dict[str, Entry] = {}
        self.workers: dict[str, Worker] = {}
        self.length = FleetLength()
        self.acceptance = FleetAcceptance.at(self.draft_len)
        self._overtaking = Overtaking(policy.overtaking_bound) if policy.overtaking_bound else None
        self._refit = Refit()
        self.tenants = Tenants()
        self.isolation = Isolation(max_deaths)
        self.load = Load()
        self.unseen = Unseen()
        self._classes = Classes()
        self.unplaced = FairRanking()
        self._deadlines = Deadlines(self.entries)
        # One profile for all, which only has to order: the first worker's at first, so that keys stay comparable.
        self._cost: CostProfile | None = None
        self._slots = 1
        self.round_s = self.cost.round_s(self.draft_len, 1)  # nominal: full batch, reference draft length

    # ---- observe ----

    def observe(self, event: Event, now: float) -> tuple[Effect, ...]:
        """Fold `event`. Raises QueueIsFull, TooLate, AlreadySubmitted or IllegalMove, and then nothing has changed."""
        match event:
            case StepDone():
                return self._step_done(event, now)
            case Submitted(request):
                return self._submitted(request, now)
            case Cancelled(id):
                entry = self.entries.get(id)
                return (self._end(entry, Move.CANCEL, None),) if entry else ()
            case WorkerUp():
                return self._worker_up(event)
            case WorkerDown(name, died):
                return self._worker_down(name, died)
            case Obeyed(name, plan, free_blocks):
                worker = self.workers[name]
                worker.obeyed(plan)
                worker.free_blocks = worker.free_blocks if free_blocks is None else free_blocks
                return ()
            case Draining(name):
                worker = self.workers[name]
                worker.draining = True
                homed = [self.entries[key[-1]] for key in worker.ranking]
                return self._displace(entry for entry in homed if entry.state is not State.RUNNING)
            case CostChanged(name, cost):
                self.workers[name].up = replace(self.workers[name].up, cost=cost)
                self._staff()
                return ()
            case Tick():
                return tuple(self._end(entry, Move.EXPIRE, None) for entry in self._deadlines.passed(now))

    def _submitted(self, request: Request, now: float) -> tuple[Effect, ...]:
        if request.id in self.entries:
            raise AlreadySubmitted(request.id)
        entry = Entry(self.tenants.admit(request, self.unseen, admission.request_s(self)))
        entry.tenant = self.tenants.find(request.tenant)
        self._believe(entry)
        admission.check(self, entry, now)
        return (Changed(self._adopt(entry).record()),)

    def _believe(self, entry: Entry) -> Entry:
        """All that a claim depends on."""
        entry.turn = self._classes.turn(entry.request.klass)
        entry.draft_len = self.draft_len
        self._believe_length(entry)
        return entry

    def _believe_length(self, entry: Entry) -> None:
        """Its length, by what is known now."""
        known = self.length.belief(entry.request.predicted_tokens, entry.request.expected)
        entry.length = known.at_least(self.policy.surest)
        entry.foresee()

    def _adopt(self, entry: Entry) -> Entry:
        """It is live from now on: what it may come to is reserved until it ends."""
        self.entries[entry.request.id] = entry
        entry.tenant = self.tenants.join(entry.request)
        entry.turn.live += 1
        self.load.reserve(entry, self.believed_rounds(entry))
        self._deadlines.add(entry)
        self.isolation.join(entry)
        if self.policy.learns and not entry.request.foreseen:
            self._refit.join(entry.request.id)
        if self._overtaking:
            self._overtaking.arrived(entry.request, self.believed_rounds(entry), admission.busy_rounds(self))
        self._rank(entry)
        return entry

    def _worker_up(self, up: WorkerUp) -> tuple[Effect, ...]:
        lost = self._worker_down(up.worker, died=not up.held)
        self.isolation.acquit(up.held)
        if self._cost is None:
            self._cost, self._slots = up.cost, up.slots
            self.round_s = up.cost.round_s(self.draft_len, up.slots)
        worker = self.workers[up.worker] = Worker(up, up.blocks)
        self._staff()
        for held in up.held:
            entry = self.entries.get(held.id)
            worker.left[held.id] = None
            # A later placement than is known: the leader that made it died before it wrote that down.
            if entry and entry.home is None and not entry.probation and entry.placement <= held.placement:
                entry.placement = held.placement
                entry.blocks, entry.offloaded, entry.prefill_owed = held.blocks, held.offloaded, held.prefill_owed
                self.place(entry, up.worker, move=False)
                worker.free_blocks -= entry.blocks
        return lost

    def _worker_down(self, name: str, died: bool) -> tuple[Effect, ...]:
        if (worker := self.workers.get(name)) is None:
            return ()
        accused = self.isolation.accuse(worker, self.entries) if died else set()
        effects = self._displace([self.entries[key[-1]] for key in worker.ranking], accused)
        del self.workers[name]
        self._staff()
        return effects

    def _staff(self) -> None:
        self.load.staff(self.workers.values(), self.draft_len)

    def _displace(self, entries: Iterable[Entry], accused: Set[Entry] = frozenset()) -> tuple[Effect, ...]:
        """They have no worker any more, and no KV; some may have killed it."""
        effects: list[Effect] = []
        for entry in entries:
            self._leave(entry)
            entry.home, entry.key = None, ()
            waited = entry.state is State.WAITING
            entry.lose_kv()
            self._rank(entry)
            if entry in accused and self.isolation.is_guilty(entry):
                effects.append(self._end(entry, Move.FAIL, None))
            elif not waited or entry in accused:
                # One that only waited writes nothing: workers may come and go for as long as the store is away.
                effects.append(Changed(entry.record()))
        return tuple(effects)

    def _step_done(self, step: StepDone, now: float) -> tuple[Effect, ...]:
        worker = self.workers[step.worker]
        worker.free_blocks = step.free_blocks
        self.load.step_done(worker, step, self.draft_len, now)
        worker.obeyed(worker.planned if step.plan is None else step.plan)
        effects: list[Effect] = []
        ran: dict[str, tuple[Entry, Round]] = {}
        for row in step.rounds:
            entry = self.entries.get(row.id)
            if not entry or (entry.home, entry.placement, entry.emitted) != (step.worker, row.placement, row.start):
                continue  # stale: it was moved, ended, or its worker ran ahead of what is durable
            entry.blocks = row.blocks
            entry.prefill_owed = row.prefill_owed
            if not row.skipped:
                entry.offloaded = 0
                ran[row.id] = entry, row
        if self._overtaking:
            self._overtaking.served([(entry.request, self.load.rounds(id)) for id, (entry, _) in ran.items()])
        charge(self._classes, ran.values(), self.round_s / self._slots, self.cost.prefill_token_s)
        for entry, row in ran.values():
            effects.append(self._round_done(entry, row, now - step.duration_s))
        for id in sorted(worker.running - ran.keys()):
            entry = self.entries.get(id)
            if entry and entry.home == step.worker and entry.state is State.RUNNING:
                entry.move(Move.PREEMPT)
                entry.preemptions += 1
                self._rank(entry)
                effects.append(Changed(entry.record()))
        worker.running = {id for id in ran if id in self.entries}
        if self._overtaking:
            for entry in [self.entries[id] for id in self._overtaking.overdue()]:
                entry.overdue = True
                self._rank(entry)
        return tuple(effects)

    def _round_done(self, entry: Entry, row: Round, began: float) -> Effect:
        if entry.state is not State.RUNNING:
            entry.move(Move.RUN)
        if entry.started is None:
            entry.started = began
        entry.emitted += row.new
        entry.foresee()
        if row.new:
            self.isolation.served(entry)
        if row.finish:
            self.workers[entry.home or ""].listed.pop(row.id, None)
        entry.prefilled = min(entry.request.prompt_tokens, entry.prefilled + row.prefilled)
        if row.prefilled:  # the whole batch waits for it, and it may take rounds of a slot
            batch_s = row.prefilled * self.cost.prefill_token_s * self._slots + (0 if row.new else self.round_s)
            entry.kv_s += batch_s
        else:
            entry.served_s += self.round_s
        if row.drafted or (row.new and not row.prefilled):
            entry.acceptance = entry.acceptance.after(row.drafted, row.accepted, row.new)
        if row.finish is Finish.ERROR:
            return self._end(entry, Move.FAIL, row.finish, row.start)
        if row.finish is not None:
            ended = self._end(entry, Move.FINISH, row.finish, row.start)
            self._learn(entry, cut=ended.cut)
            return ended
        entry.perceptible = entry.perceptible or self.policy.perceives(EntryView(self, entry))
        self._rank(entry)
        return Advanced(entry.record(), row.start)

    def _end(self, entry: Entry, move: Move, finish: Finish | None, start: int | None = None) -> Ended:
        entry.move(move)
        self._leave(entry)
        del self.entries[entry.request.id]
        self.tenants.leave(entry.request)
        self.isolation.leave(entry)
        self._refit.leave(entry.request.id)
        entry.turn.leave()
        self.load.release(entry.request)
        if self._overtaking:
            self._overtaking.ended(entry.request)
        return Ended(entry.record(), finish, start)

    def _learn(self, entry: Entry, *, cut: bool) -> None:
        self.length.observe(entry.emitted, entry.request.predicted_tokens, cut=cut)
        self.acceptance.observe(entry.acceptance)
        if self.policy.learns:
            self._refit.learned(self.length, self.acceptance)

    # ---- order ----

    def _rekey(self) -> None:
        """Let some claims follow what was learned."""
        for id in self._refit.due():
            self._believe_length(self.entries[id])
            self._rank(self.entries[id])

    @property
    def cost(self) -> CostProfile:
        return self._cost or CostProfile()

    def _ranking(self, entry: Entry) -> FairRanking:
        return self.unplaced if entry.home is None else self.workers[entry.home].ranking

    def _leave(self, entry: Entry) -> None:
        """It is no longer where it was."""
        self._ranking(entry).remove(entry.key)
        if entry.home is not None:
            self.workers[entry.home].left[entry.request.id] = None

    def _rank(self, entry: Entry) -> None:
        """Put it where its claim belongs; called whenever anything that the claim depends on has changed."""
        self.load.update(entry, self.believed_rounds(entry))
        key = self.key(entry)
        if key == entry.key:
            return
        if entry.key:
            self._ranking(entry).move(entry.key, key)
        else:
            self._ranking(entry).add(key)
        entry.key = key

    def key(self, entry: Entry) -> Key:
        """Where it belongs among all others, by its class, tenant and claim as they are now."""
        entry.claim = self.policy.claim(EntryView(self, entry), self.round_s)
        # A running request keeps its place against an equal claim: only a strictly higher one preempts.
        waits = entry.state is not State.RUNNING
        # Without preemption who has begun goes first. Not who ran last: with plans a round late two would take turns.
        new = entry.started is None and not self.policy.preemptive
        request = entry.request
        claim = Claim(1, -1, request.arrival) if entry.overdue else entry.claim
        return (new, entry.turn, entry.tenant, *claim, waits, request.arrival, request.id)

    def place(self, entry: Entry, home: str, *, move: bool = True) -> None:
        """Make `home` its worker. Its KV elsewhere is given up: what the old home still reports is stale."""
        self._leave(entry)
        entry.key = ()
        entry.home = home
        self.workers[home].left.pop(entry.request.id, None)
        if move:
            entry.lose_kv()
            entry.placement += 1
        self._rank(entry)

    # ---- plan ----

    def plan(self, name: str) -> Plan:
        """What the worker shall run from now on. Places waiting requests on it, and claims some of another's if it
        would be idle while those wait."""
        self._rekey()
        worker = self.workers[name]
        suspects = self.isolation.plan(self, name)
        rank = placement.choose(self, name) if suspects is None else suspects
        by_claim_reversed = (self.entries[key[-1]] for key in reversed(worker.ranking))
        rank, evict = kv.fit(worker, rank, by_claim_reversed, apart=suspects is not None)
        for entry, copy in evict.items():
            worker.free_blocks += entry.blocks  # once this plan is carried out, which the next one may rely on
            entry.offload_kv(copy) if copy else entry.lose_kv()
            entry.placement += 1  # a row of the round in hand must not bring back what the plan gives away
            self._rank(entry)
        if self._adaptive:
            choose_draft_lengths(rank[: worker.up.slots], self.acceptance, worker.up.cost, worker.up.max_draft)
        runs = tuple(self._run(entry, worker.up.max_draft) for entry in rank)
        worker.plan(run.id for run in runs)
        drop = tuple(entry.request.id for entry, copy in evict.items() if not copy)
        offload = tuple(entry.request.id for entry, copy in evict.items() if copy)
        forget, worker.left = tuple(worker.left), {}
        return Plan(runs, drop, offload, forget)

    def _run(self, entry: Entry, longest: int) -> Run:
        probe = self._adaptive and entry.rounds % PROBE_ROUNDS == 0
        draft_len = min(max(entry.draft_len, int(probe)), longest)
        return Run(entry.request.id, entry.placement, draft_len, self.prefill_chunk)

    # ---- what others may ask ----

    def rankings(self) -> tuple[FairRanking, ...]:
        """Every live request is in one of them."""
        return (self.unplaced, *(worker.ranking for worker in self.workers.values()))

    def believed_rounds(self, entry: Entry) -> int:
        """That it still needs, by what is believed of its length given that it did not end yet."""
        return math.ceil(entry.left_tokens / self.tokens_per_round)

    @property
    def tokens_per_round(self) -> float:
        """As finished requests had them."""
        return self.acceptance.per_round + 1

    # ---- across restarts ----

    def snapshot(self) -> Iterator[Record]:
        return (entry.record() for entry in self.entries.values())

    def restore(self, records: Iterable[Record]) -> None:
        for record in records:
            self._adopt(self._believe(Entry.restored(record)))
