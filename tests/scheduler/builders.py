"""Short ways to make the core's data in tests, and a worker that runs plans without a model."""

from dataclasses import dataclass, fields

from scheduler_service.core.beliefs import SOME_LENGTH, Acceptance, Forecast, Length
from scheduler_service.core.core import Core
from scheduler_service.core.costs import CostProfile
from scheduler_service.core.events import Held, Round, StepDone, Submitted, Tick, WorkerUp
from scheduler_service.core.policies import make_policy
from scheduler_service.core.types import Effect, Finish, Record, Request, RequestClass, View

COST = CostProfile(draft_s=0.0, verify_s=1.0, verify_slope_s=0.0, prefill_token_s=0.0)


def request(id: str, arrival: float = 0.0, *, prompt: int = 4, max_tokens: int = 1000, **more: object) -> Request:
    return Request(id, arrival, prompt, max_tokens, **more)  # type: ignore[arg-type]


def worker_up(
    name: str = "w",
    slots: int = 1,
    blocks: int = 1000,
    held: tuple[Held, ...] = (),
    cost: CostProfile = COST,
    host_blocks: int = 0,
) -> WorkerUp:
    return WorkerUp(name, slots, blocks, 16, max_draft=4, cost=cost, held=held, host_blocks=host_blocks)


def records(core: Core) -> list[Record]:
    """What the store would have of all live requests."""
    return [entry.record() for entry in core.fleet.entries.values()]


def core(policy: str = "laps-sd", *settings: str, **options: object) -> Core:
    return Core(make_policy(policy, settings), **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Seen:
    """A `View` that stays as it is."""

    request: Request
    emitted: int = 0
    acceptance: Acceptance = Acceptance()  # noqa: RUF009
    perceptible: bool = False
    length: Length = SOME_LENGTH
    attained_s: float = 0.0
    predicted_tokens: int = 100
    prefill_s: float = 0.0
    prior_accepted: float = 2.0
    usual_accepted: float = 2.0
    live_per_slot: float = 0.0
    memory_short: bool = False
    hidden_s: float = 0.0
    since: int = 0
    resume_s: float = 0.0

    @property
    def remaining_tokens(self) -> float:
        return Forecast(self.length, self.request.max_tokens).remaining(self.emitted)

    @classmethod
    def of(cls, view: View) -> "Seen":
        return cls(**{field.name: getattr(view, field.name) for field in fields(cls)})


class FakeWorker:
    """Runs the newest plan: a request's prefill first, then `emit` tokens a round until its true length."""

    def __init__(
        self,
        core: Core,
        lengths: dict[str, int],
        name: str = "w",
        slots: int = 1,
        blocks: int = 1000,
        cost: CostProfile = COST,
        host_blocks: int = 0,
    ) -> None:
        self.core, self.lengths, self.name, self.slots, self.blocks = core, lengths, name, slots, blocks
        self.output: dict[str, int] = {}
        self.resident: dict[str, int] = {}  # placement by request with KV
        self.offloaded: set[str] = set()
        self.ran: list[tuple[str, ...]] = []
        self.now = 0.0
        core.observe(worker_up(name, slots, blocks, cost=cost, host_blocks=host_blocks), self.now)

    def submit(self, *ids: str, **more: object) -> None:
        for id in ids:
            self.core.observe(Submitted(request(id, self.now, **more)), self.now)  # type: ignore[arg-type]

    def step(self, emit: int = 1, drafted: int = 4) -> tuple[Effect, ...]:
        """One round of the worker; a second passes."""
        plan = self.core.plan(self.name)
        for id in (*plan.drop, *plan.offload):
            self.resident.pop(id, None)
        self.offloaded.update(plan.offload)
        rows = [self._row(run.id, run.placement, emit, drafted) for run in plan.schedule[: self.slots]]
        self.ran.append(tuple(row.id for row in rows))
        self.now += 1
        return self.core.observe(StepDone(self.name, tuple(rows), self._free(), 1.0), self.now)

    def expire(self, now: float) -> tuple[Effect, ...]:
        """What is past its deadline then."""
        self.now = now
        return self.core.observe(Tick(), now)

    def run(self, rounds: int, emit: int = 1) -> list[str]:
        """Which request ran alone in each of the rounds."""
        for _ in range(rounds):
            self.step(emit)
        return [ids[0] if ids else "" for ids in self.ran[-rounds:]]

    def _row(self, id: str, placement: int, emit: int, drafted: int) -> Round:
        entry = self.core.fleet.entries[id]
        start = entry.emitted
        prefill = 0 if self.resident.get(id) == placement or id in self.offloaded else entry.tokens
        self.resident[id] = placement
        self.offloaded.discard(id)
        new = min(1 if prefill else emit, self.lengths[id] - start)
        done = start + new >= self.lengths[id]
        if done:
            del self.resident[id]
        blocks = -(-(entry.tokens + new) // 16)
        drafts = 0 if prefill else drafted
        finish = Finish.STOP if done else None
        return Round(id, placement, start, new, drafts, min(drafts, max(0, new - 1)), prefill, 0, blocks, finish)

    def _free(self) -> int:
        entries = self.core.fleet.entries
        return self.blocks - sum(-(-entries[id].tokens // 16) for id in self.resident if id in entries)


__all__ = ["COST", "Core", "FakeWorker", "RequestClass", "core", "request", "worker_up"]
