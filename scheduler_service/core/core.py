"""The scheduling core: observe events, plan rounds. The live service and the simulator are two shells around it.

`observe` folds an event into the state and says what came of it; `plan` says what a worker shall run. Both are
deterministic: equal inputs give equal plans. Nothing here waits, reads a clock or speaks to anybody.
"""

from collections.abc import Iterable, Iterator, Set
from dataclasses import replace
from itertools import chain, islice

from scheduler_service.core import admission, backlog
from scheduler_service.core.draft import REFERENCE
from scheduler_service.core.entry import Entry
from scheduler_service.core.events import (
    Cancelled,
    CostChanged,
    Draining,
    Event,
    Obeyed,
    StepDone,
    Submitted,
    Tick,
    WorkerDown,
    WorkerUp,
)
from scheduler_service.core.fleet import Fleet
from scheduler_service.core.lifecycle import Move, State
from scheduler_service.core.plan import make_plan
from scheduler_service.core.policies import Policy
from scheduler_service.core.steps import step_done
from scheduler_service.core.types import UNBOUNDED, AlreadySubmitted, Bounds, Changed, Effect, Plan, Record, Request

PREFILL_CHUNK = 256  # tokens of prompt in one round, if nothing else is said
NEARLY_S = 0.25  # before its deadline a request that is cancelled expires: gateways and clients give up a little early
SETTLED_S = 10.0  # a fleet in which no worker has come or gone for so long is complete


class Core:
    """`draft_len`: tokens proposed in a round; None: as many as pay. `prefill_chunk`: prompt tokens computed in one.
    `bounds`: what may be live. `max_deaths`: workers that may die while a request runs there alone, until it is
    ended. `few_plans`: a plan may have to last for several rounds, so it lists more requests than run. `plans_lag`: a
    worker goes on by its last plan before the answer to its report comes. `ready_first`: a request whose drafts are
    still on their way from elsewhere may let the next that is ready go first. `foresight`: nobody begins where memory
    is believed to run out before those beside it have ended."""

    def __init__(
        self,
        policy: Policy,
        *,
        draft_len: int | None = 4,
        prefill_chunk: int = PREFILL_CHUNK,
        bounds: Bounds = UNBOUNDED,
        max_deaths: int = 3,
        few_plans: bool = False,
        plans_lag: bool = False,
        ready_first: bool = False,
        foresight: bool = False,
    ) -> None:
        self.fleet = Fleet(policy, REFERENCE if draft_len is None else draft_len, bounds, max_deaths)
        self.fleet.few_plans = few_plans
        self.fleet.plans_lag = plans_lag
        self.fleet.ready_first = ready_first
        self.fleet.foresight = foresight
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
        """Fold `event`. Raises QueueIsFull, TooLarge, TooLate, AlreadySubmitted or IllegalMove, and then nothing has
        changed."""
        fleet = self.fleet
        match event:
            case StepDone():
                return step_done(fleet, event, now)
            case Submitted(request):
                return self._submitted(request, now)
            case Cancelled(id):
                entry = fleet.entries.get(id)
                return (fleet.end(entry, _cancel(entry, now)),) if entry else ()
            case WorkerUp():
                return self._worker_up(event, now)
            case WorkerDown(name, died):
                return self._worker_down(name, died, now)
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
            case Tick(most):
                expired = (fleet.end(entry, Move.EXPIRE) for entry in fleet.deadlines.passed(now))
                return tuple(islice(chain(expired, self._give_up(now)), most))

    # ---- requests come and go ----

    def _submitted(self, request: Request, now: float) -> tuple[Effect, ...]:
        fleet = self.fleet
        if request.id in fleet.entries:
            raise AlreadySubmitted(request.id)
        request = fleet.tenants.admit(request, fleet.unseen, backlog.request_s(fleet))
        entry = fleet.prepare(Entry(request, fleet.known))
        admission.check(fleet, entry, now)
        self._add(entry)
        return (Changed(entry.record_to_write()),)

    def _add(self, entry: Entry) -> None:
        fleet = self.fleet
        fleet.add(entry)
        if fleet.overtaking:
            fleet.overtaking.arrived(entry.request, fleet.believed_rounds(entry), backlog.busy_rounds(fleet))

    def _give_up(self, now: float) -> Iterator[Effect]:
        """End the requests that no worker can hold any more: all workers were lost, and smaller ones came back. They
        wait until the fleet has stayed as it is for SETTLED_S, since a larger worker may be on its way. No other
        request waits behind them: no worker lists them."""
        fleet = self.fleet
        if fleet.workers and now - fleet.staffed_at >= SETTLED_S:
            for entry in fleet.homeless():
                tokens = entry.request.most_tokens
                yield fleet.end(entry, Move.FAIL, reason=f"no worker can hold it: it may come to {tokens} tokens")

    # ---- workers come and go ----

    def _worker_up(self, up: WorkerUp, now: float) -> tuple[Effect, ...]:
        fleet = self.fleet
        lost = self._worker_down(up.worker, died=not up.held, now=now)
        fleet.isolation.acquit(up.worker, up.held)
        worker = fleet.attach(up, now)
        for held in up.held:
            entry = fleet.entries.get(held.id)
            worker.to_forget[held.id] = None
            # A later placement than is known: the leader that made it died before it wrote that down.
            if entry and entry.home is None and not entry.probation and entry.placement <= held.placement:
                entry.placement, entry.changed = held.placement, True
                entry.blocks, entry.offloaded, entry.prefill_owed = held.blocks, held.offloaded, held.prefill_owed
                fleet.place(entry, up.worker, move=False)
                worker.free_blocks -= entry.blocks
        return lost

    def _worker_down(self, name: str, died: bool, now: float) -> tuple[Effect, ...]:
        fleet = self.fleet
        if (worker := fleet.workers.get(name)) is None:
            return ()
        accused = fleet.isolation.accuse(worker, fleet.entries) if died else set()
        effects = self._displace(fleet.homed(worker), accused)
        fleet.detach(name, now)
        return effects

    def _displace(self, entries: Iterable[Entry], accused: Set[Entry] = frozenset()) -> tuple[Effect, ...]:
        """These requests have no worker any more, and no KV. The `accused` may have killed it."""
        effects: list[Effect] = []
        for entry in entries:
            waited = entry.state is State.WAITING
            self.fleet.displace(entry)
            if entry in accused and self.fleet.isolation.is_guilty(entry):
                effects.append(self.fleet.end(entry, Move.FAIL))
            elif not waited or entry in accused:
                # A request that only waited writes nothing: workers may come and go while the store is away.
                effects.append(Changed(entry.record_to_write()))
        return tuple(effects)


def _cancel(entry: Entry, now: float) -> Move:
    """How the cancelled request ends. A client that waits until the deadline hangs up then: the request expires."""
    deadline = entry.request.deadline
    return Move.CANCEL if deadline is None or now < deadline - NEARLY_S else Move.EXPIRE
