"""A worker without a model: carries out plans on jobs whose outcome is known. It obeys; it decides nothing."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from scheduler_service.core.core import Core
from scheduler_service.core.costs import CostProfile
from scheduler_service.core.draft import REFERENCE
from scheduler_service.core.entry import Entry
from scheduler_service.core.events import Round, StepDone, WorkerUp
from scheduler_service.core.types import Finish, Plan, Run
from scheduler_service.sim.costs import StepCosts
from scheduler_service.sim.drafter import Apart
from scheduler_service.sim.workload import Job

UNBOUNDED = 10**12  # tokens of KV
MOST_DRAFTS = 8  # that a worker takes by default


@dataclass(frozen=True, slots=True)
class SimFleet:
    """The workers that serve the requests, all alike. `kv_budget_tokens` and `host_kv_tokens` are per worker.
    `foresight`: no request begins if memory is believed to run out before it ends, as inside vLLM."""

    slots: int = 1
    workers: int = 1
    draft_len: int | None = 4  # None: chosen by the core
    costs: StepCosts = field(default_factory=StepCosts)
    kv_budget_tokens: int = UNBOUNDED
    plan_lag: int = 0
    prefill_chunk: int = UNBOUNDED
    host_kv_tokens: int = 0
    most_drafts: int = MOST_DRAFTS  # where the core chooses
    apart: Apart | None = None  # where drafts are made; None: on the worker itself
    foresight: bool = False

    @property
    def max_draft(self) -> int:
        return self.most_drafts if self.draft_len is None else self.draft_len

    @property
    def reference_draft(self) -> int:
        """In which loads and nominal seconds are counted."""
        return REFERENCE if self.draft_len is None else self.draft_len

    def worker_up(self, name: str) -> WorkerUp:
        return WorkerUp(
            name, self.slots, self.kv_budget_tokens, 1, self.max_draft, self.profile(), (), self.host_kv_tokens
        )

    def profile(self, hit: float = 1.0, fallback: float = 0.0, wait_s: float = 0.0) -> CostProfile:
        """What rounds cost, as the worker reports it. `hit`, `fallback`, `wait_s`: as it has found them."""
        cost, apart = self.costs.profile(), self.apart
        if apart is None:
            return cost
        supply_s = 1e-3 * (apart.supply_ms + apart.chain_ms * (min(apart.chains, self.slots) - 1))
        delay_s = 1e-3 * apart.rtt_ms
        return replace(
            cost,
            supply_s=supply_s,
            delay_s=delay_s,
            hit=hit,
            chains=apart.chains,
            fallback=fallback,
            wait_s=wait_s,
        )

    def can_hold(self, job: Job) -> bool:
        """Whether the job fits alone, with the reserve that the core keeps."""
        return job.prompt_tokens + job.output_tokens + 2 * (self.max_draft + 1) <= self.kv_budget_tokens


@dataclass(slots=True)
class Held:
    """KV of one request."""

    placement: int
    tokens: int = 0
    offloaded: int = 0  # tokens in the host's memory; on the device there are none then


class SimWorker:
    """`step` says at its beginning what a round will have done at its end."""

    def __init__(self, name: str, core: Core, jobs: Mapping[str, Job], fleet: SimFleet) -> None:
        self.name = name
        self._core, self._jobs, self._fleet = core, jobs, fleet
        self._plan = Plan((), ())
        self._due: list[tuple[str, bool]] = []  # whose KV is to be released before the next round; True: offloaded
        self._admitted: dict[str, int] = {}  # the placement of each request that it knows
        self._held: dict[str, Held] = {}
        self._free = fleet.kv_budget_tokens
        self._ran: set[str] = set()
        self._exhausted = False

    def obey(self, plan: Plan) -> list[str]:
        """The newest plan stands; what any has dropped or moved elsewhere is released before the next round. Returns
        what is new here."""
        entries = self._core.fleet.entries
        moved = [id for id in self._admitted if id not in entries or entries[id].home != self.name]
        for id in moved:
            del self._admitted[id]
        if self._exhausted:
            self._exhausted = not (moved or plan.drop or plan.offload) and plan.schedule == self._plan.schedule
        self._plan = plan
        self._due += [(id, False) for id in (*moved, *plan.drop)] + [(id, True) for id in plan.offload]
        if self._fleet.workers == 1:  # nothing is ever moved
            return []
        new = [run.id for run in plan.schedule if self._admitted.get(run.id) != run.placement]
        self._admitted.update((run.id, run.placement) for run in plan.schedule)
        return new

    def knows(self, ids: Sequence[str]) -> bool:
        """Whether one of them was admitted here and not moved away since."""
        return not self._admitted.keys().isdisjoint(ids)

    def step(self, now: float = 0.0) -> StepDone | None:
        """One round, from `now`, of the plan's first runnable requests; None if it lists none. If memory is short for
        all of them it takes no time, its report is what tells the core, and only another plan can change anything."""
        if self._exhausted:
            return None
        for id, offload in self._due:
            self._release(id, offload)
        self._due.clear()
        rows: list[Round] = []
        drafted = verified = prefilled = resumed = restored = ran = 0
        live = [run for run in self._plan.schedule if run.id in self._core.fleet.entries]  # others ended since then
        wait_s, listed = self._arrange(live, now)
        for run in listed:
            entry = self._core.fleet.entries[run.id]
            held = self._held.get(run.id)
            kept = held is not None and held.tokens > 0 and held.placement == run.placement and run.id not in self._ran
            offloaded = min(held.offloaded, entry.tokens) if held else 0
            row = self._row(run, entry)
            rows.append(row)
            if row.skipped:
                continue
            drafted = max(drafted, self._drafted_here(run, row))
            verified += row.drafted + 1 if row.new else 0
            prefilled += row.prefilled
            resumed += kept
            restored += offloaded
            ran += 1
            if ran == self._fleet.slots:
                break
        if not rows:
            return None
        self._ran = {row.id for row in rows if not row.skipped}
        self._exhausted = not ran
        rows += self._deferred(live)
        for row in rows:
            if row.finish:
                self._release(row.id)
        step_s = self._fleet.costs.step_s(drafted, ran, verified, prefilled, resumed, restored)
        step_s = wait_s + step_s if ran else 0.0
        self._done(rows, now + step_s)
        return StepDone(self.name, tuple(rows), self._free, step_s)

    # ---- for the lean loop (lean.py), which runs rounds of its own ----

    @property
    def free(self) -> int:
        """Tokens of KV."""
        return self._free

    def holds_all(self, entry: Entry) -> bool:
        """Whether all KV of the request is on the device."""
        held = self._held.get(entry.request.id)
        return held is not None and held.placement == entry.placement and held.tokens == entry.tokens

    def holds_any(self, entry: Entry) -> bool:
        return entry.request.id in self._held

    def has(self, entry: Entry) -> None:
        """All KV of the request is on the device now."""
        held = self._held.setdefault(entry.request.id, Held(entry.placement))
        self._free -= entry.tokens - held.tokens
        held.tokens = entry.tokens

    def forget(self, id: str) -> None:
        self._release(id)

    def ran_last(self, ids: Iterable[str]) -> None:
        """These were in the last round."""
        self._ran, self._exhausted = set(ids), False

    # ---- what differs where drafts are made elsewhere (apart_worker.py) ----

    def _arrange(self, listed: list[Run], now: float) -> tuple[float, list[Run]]:
        """The seconds that the round waits first, and in which order requests are tried."""
        return 0.0, listed

    def _drafts(self, run: Run, entry: Entry, prefilled: int) -> tuple[int, int]:
        """How many tokens are drafted in this round, and how many of them the target would accept."""
        job = self._jobs[run.id]
        round = job.round(entry.rounds, entry.emitted)
        drafts = job.drafts(round, run.draft_len)
        return drafts, job.accepts(round, drafts)

    def _drafted_here(self, run: Run, row: Round) -> int:
        """Positions that the worker drafted itself."""
        return row.drafted

    def _deferred(self, listed: list[Run]) -> list[Round]:
        """Those that only wait for drafts."""
        return []

    def cost_told(self) -> CostProfile | None:
        """What rounds cost, if that is no longer what it told last."""
        return None

    def _done(self, rows: Sequence[Round], at: float) -> None:
        """These will have run then."""

    def _row(self, run: Run, entry: Entry) -> Round:
        held = self._held.get(run.id)
        if held is None or held.placement != run.placement:
            self._release(run.id)
            held = self._held[run.id] = Held(run.placement, offloaded=held.offloaded if held else 0)
        start, tokens = entry.emitted, entry.tokens
        restored = min(held.offloaded, tokens)
        lacking = owed = tokens - held.tokens - restored
        prefill = 0
        if owed:
            prefill = min(owed, run.prefill_tokens)
            owed -= prefill
        new = drafts = accepted = 0
        finish = reading = None
        if not owed:
            job = self._jobs[run.id]
            drafts, accepted = self._drafts(run, entry, prefill)
            new = accepted + 1
            if new >= job.output_tokens - start:
                new = job.output_tokens - start
                accepted = min(accepted, new)
                finish = Finish.LENGTH
            reading = job.reading(start, new) if job.readings else None
        grown = restored + prefill + new
        if grown > self._free:
            return Round(run.id, run.placement, start, 0, 0, 0, 0, lacking, held.tokens, None, True)
        self._free -= grown
        held.tokens += grown
        held.offloaded = 0
        blocks = held.tokens
        done = (new, drafts, accepted, prefill, owed, blocks, finish)
        return Round(run.id, run.placement, start, *done, reading=reading)

    def _release(self, id: str, offload: bool = False) -> None:
        held = self._held.pop(id, None)
        if held is not None:
            self._free += held.tokens
            if offload:
                self._held[id] = Held(held.placement, offloaded=held.tokens)
