"""What goes into the core: what happened, event by event. Plain data; times are seconds, sizes tokens or blocks."""

from dataclasses import dataclass

from scheduler_service.core.costs import CostProfile
from scheduler_service.core.probed import Reading
from scheduler_service.core.types import Finish, Request
from scheduler_service.core.value import value


@value
class Submitted:
    request: Request


@dataclass(frozen=True, slots=True)
class Cancelled:
    id: str


@dataclass(frozen=True, slots=True)
class Held:
    """KV of a request that a worker still has when it attaches."""

    id: str
    placement: int
    blocks: int = 0
    offloaded: int = 0  # blocks of it in the host's memory
    prefill_owed: int = 0


@dataclass(frozen=True, slots=True)
class WorkerUp:
    worker: str
    slots: int
    blocks: int
    block_tokens: int
    max_draft: int
    cost: CostProfile
    held: tuple[Held, ...] = ()
    host_blocks: int = 0  # of KV, that can be offloaded at a time


@dataclass(frozen=True, slots=True)
class WorkerDown:
    worker: str
    died: bool = False  # as far as can be seen: it did not take its leave


@dataclass(frozen=True, slots=True)
class Obeyed:
    """No round of a plan before this one is under way any more."""

    worker: str
    plan: int  # counted from 1, by the worker's connection
    free_blocks: int | None = None  # since then; None: it did not say


@dataclass(frozen=True, slots=True)
class Draining:
    """A worker wants to end. Requests that run there may go on, its others go elsewhere, and no new ones come."""

    worker: str


@value
class Round:
    """One row of a report, without its token ids: those stay in the shell. If it holds several rounds, `new`, `drafted`
    and `accepted` are their sums, and `each` has the three numbers of every round."""

    id: str
    placement: int
    start: int  # output tokens before
    new: int  # output tokens emitted
    drafted: int
    accepted: int
    prefilled: int
    prefill_owed: int
    blocks: int
    finish: Finish | None = None
    skipped: bool = False
    each: tuple[tuple[int, int, int], ...] = ()
    deferred: bool = False  # `skipped` until its drafts are there: another went first, and it was not preempted
    reading: Reading | None = None  # of the worker's probe, in the last of these rounds that had one

    @property
    def count(self) -> int:
        """How many rounds these are. A row that was skipped may hold rounds before that."""
        return len(self.each) or (0 if self.skipped else 1)


@value
class StepDone:
    """A worker's report of what requests did since it last reported them. A request without a row did not run in the
    last round; but if the report is `partial`, only a row that was skipped says so."""

    worker: str
    rounds: tuple[Round, ...]
    free_blocks: int
    duration_s: float  # of the last round
    plan: int | None = None  # which one it carried out, as in Obeyed; None: the newest
    partial: bool = False


@dataclass(frozen=True, slots=True)
class CostChanged:
    """A worker's rounds cost something else than it said before."""

    worker: str
    cost: CostProfile


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: what is past its deadline expires, and what no worker can hold fails."""

    most: int | None = None  # so many requests end by it; None: all that are due


Event = Submitted | Cancelled | WorkerUp | WorkerDown | Draining | Obeyed | StepDone | CostChanged | Tick
