"""The core with its beliefs and costs, as one vLLM drives it: it is told of requests and steps, and asked for the
order. It knows nothing of vLLM, reads no clock and does no I/O.

Most steps change nothing in the order, so most are not told to the core at once: rounds of requests that merely go on
wait until EVERY running requests are one step, and a plan is made only where something has changed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from laps_sd_vllm.steps import TO_THE_END, Desired, Place, StepDone, StepRow
from scheduler_service.core.core import Core
from scheduler_service.core.costs import CostProfile
from scheduler_service.core.events import Cancelled, CostChanged, Round, Submitted, WorkerUp
from scheduler_service.core.events import StepDone as CoreStep
from scheduler_service.core.policies import Policy
from scheduler_service.core.types import Ended, Finish, Request

NAME = "vllm"
EVERY = 8  # running requests: with so many more, rounds wait one step more ...
MOST_STEPS = 16  # ... but not longer
FINISH = {name: Finish.LENGTH if name == "FINISHED_LENGTH_CAPPED" else Finish.STOP for name in TO_THE_END}


@dataclass(frozen=True, slots=True)
class Engine:
    """`blocks` of KV, `block_tokens` each. `max_draft`: tokens that the drafter makes; `prefill_chunk`: at most so many
    tokens of a prompt in a step. `start`: what steps are taken to cost until they tell."""

    slots: int
    blocks: int
    block_tokens: int
    max_draft: int
    prefill_chunk: int
    start: CostProfile


class Ordering:
    """`draft_len`: as in `Core`. `blocks_of`: blocks of KV that a request holds."""

    def __init__(
        self, policy: Policy, engine: Engine, draft_len: int | None, blocks_of: Callable[[str], int], now: float
    ) -> None:
        self.core = Core(policy, draft_len=draft_len, prefill_chunk=engine.prefill_chunk, foresight=True)
        self._slots, self._low = engine.slots, 4 * engine.slots
        self._blocks_of = blocks_of
        self._rounds: dict[str, list[StepRow]] = {}  # that the core does not know of yet
        self._ran: set[str] = set()  # in the last step, and go on
        self._steps = 0  # since all rounds were told
        self._changed = False  # since the last plan
        up = WorkerUp(NAME, engine.slots, engine.blocks, engine.block_tokens, engine.max_draft, engine.start)
        self.core.observe(up, now)

    # ---- what happened ----

    def submitted(self, request: Request, now: float) -> None:
        """Raises AlreadySubmitted."""
        self.core.observe(Submitted(request), now)
        self._changed = True

    def cancelled(self, id: str, now: float) -> None:
        self._rounds.pop(id, None)
        self._ran.discard(id)
        self.core.observe(Cancelled(id), now)
        self._changed = True

    def step(self, step: StepDone, seconds: float, now: float) -> tuple[Ended, ...]:
        """Fold a step that took so many `seconds`. Returns the requests that ended in it, as far as the core knew
        them."""
        entries, rounds, before = self.core.fleet.entries, self._rounds, self._ran
        ran: set[str] = set()
        due: list[str] = []
        for row in step.rows:
            id = row.request_id
            if id not in entries:
                continue
            held = rounds.get(id)
            if held is None:
                held = rounds[id] = []
            held.append(row)
            if row.status is None and not row.evicted:
                ran.add(id)
                if row.prefilled or id not in before:
                    due.append(id)
            else:
                due.append(id)
        stopped = [id for id in before if id not in ran and id in entries and id not in due]
        self._ran = ran
        self._steps += 1
        if self._steps >= min(MOST_STEPS, max(1, len(ran) // EVERY)):
            self._steps, due = 0, [id for id in rounds if id not in stopped]
        if not due and not stopped:
            return ()
        told = [self._told(id, rows := rounds.pop(id), rows[-1].evicted) for id in due]
        told += [self._told(id, rounds.pop(id, []), True) for id in stopped]
        effects = self.core.observe(CoreStep(NAME, tuple(told), step.free_blocks, seconds, None, True), now)
        ended = tuple([effect for effect in effects if isinstance(effect, Ended)])
        # With nobody waiting and memory left the order does not matter.
        if stopped or ended or self.core.fleet.crowded or step.free_blocks < self._low:
            self._changed = True
        return ended

    def _told(self, id: str, rows: list[StepRow], stopped: bool) -> Round:
        """These rounds of one request in one row. `stopped`: it did not run in this step, or vLLM has taken its KV."""
        entry = self.core.fleet.entries[id]
        ran = [row for row in rows if not row.evicted]
        each = tuple([(len(row.tokens), row.drafted, row.accepted) for row in ran])
        new, drafted, accepted = map(sum, zip(*each, strict=True)) if each else (0, 0, 0)
        finish, owed, blocks = None, entry.prefill_owed, 0
        if rows:
            last = rows[-1]
            owed = last.prefill_owed
            if last.status is not None:
                finish = FINISH.get(last.status.name, Finish.ERROR)
        if finish is None:
            blocks = self._blocks_of(id)
        return Round(
            id,
            entry.placement,
            rows[0].start if rows else entry.emitted,
            new,
            drafted,
            accepted,
            sum([row.prefilled for row in ran]),
            owed,
            blocks,
            finish,
            stopped,
            each if stopped or len(each) > 1 else (),
        )

    def costs(self, cost: CostProfile) -> None:
        """Steps cost this now."""
        self.core.observe(CostChanged(NAME, cost), 0.0)

    def recost(self, cost: CostProfile) -> None:
        """Reckon all claims in these costs from now on. Those of live requests are made anew, to stay comparable."""
        fleet = self.core.fleet
        fleet.known.cost, fleet.known.round_s = cost, cost.round_s(fleet.known.draft_len, self._slots)
        for entry in fleet.entries.values():
            fleet.rank(entry)
        self._changed = True

    # ---- what to do ----

    def again(self) -> None:
        """Somebody else decided meanwhile: the next plan is made whatever has happened."""
        self._changed = True

    def plan(self) -> tuple[tuple[str, ...], Desired] | None:
        """Requests that must give their KV back, and the order from now on. None: as before."""
        if not self._changed:
            return None
        self._changed = False
        plan = self.core.plan(NAME)
        for id in (*plan.drop, *plan.offload):
            if rows := self._rounds.get(id):  # rounds that the core is told of later, when that KV is gone already
                start = rows[-1].start + len(rows[-1].tokens)
                rows.append(StepRow(id, start, prefill_owed=self.core.fleet.entries[id].request.prompt_tokens + start))
                rows[-1].evicted = True
        rank = [Place(run.id, run.draft_len, run.prefill_tokens) for run in plan.schedule]
        if len(rank) < self._slots:  # memory is short, and what it holds must not stand idle: vLLM makes room for them
            listed = {place.request_id for place in rank}
            rank += [place for place in self._holding() if place.request_id not in listed]
        return (*plan.drop, *plan.offload), Desired(rank, self._slots)

    def _holding(self) -> list[Place]:
        """Requests that hold KV, the best claim first. Where one lacks a block, vLLM takes the last one's."""
        fleet = self.core.fleet
        homed = fleet.homed(fleet.workers[NAME])
        return [Place(entry.request.id, entry.draft_len) for entry in homed if entry.blocks]
