"""A worker without a model whose KV fills blocks as the engine's does: without the last token of the output, the first
blocks shared among all requests, and a request for which there is no block is skipped."""

from random import Random

from scheduler_service.core.core import Core
from scheduler_service.core.events import Round, StepDone
from scheduler_service.core.types import Finish, Plan
from tests.scheduler.builders import worker_up

SIZE = 16  # tokens of a block


class BlockWorker:
    """`lengths`: of each request's output. `total`, `shared`, `host`: blocks of its memory, of the beginning that all
    prompts have in common, and of its host's memory."""

    def __init__(
        self, core: Core, lengths: dict[str, int], total: int, slots: int, shared: int, host: int, rng: Random
    ) -> None:
        self.core, self.lengths, self.slots, self.rng = core, lengths, slots, rng
        self.total, self.shared = total, shared
        self.kv: dict[str, tuple[int, int]] = {}  # by request: placement, tokens
        self.offloaded: dict[str, int] = {}  # by request: tokens
        self.now = 0.0
        core.observe(worker_up(slots=slots, blocks=total, host_blocks=host), 0.0)

    @property
    def free(self) -> int:
        """Blocks, beside the shared ones."""
        return self.total - self.shared - sum(self.own(tokens) for _, tokens in self.kv.values())

    def own(self, tokens: int) -> int:
        """Blocks of that many tokens of a request which no other has."""
        return max(0, -(-tokens // SIZE) - self.shared)

    def step(self) -> int:
        """A plan, and the round that follows. Returns how many requests ran."""
        plan = self.core.plan("w")
        for id in plan.offload:
            if id in self.kv:
                self.offloaded[id] = self.kv.pop(id)[1]
        for id in (*plan.drop, *plan.to_forget):
            self.kv.pop(id, None)
            self.offloaded.pop(id, None)
        rows = self._rows(plan)
        self.now += 1
        free = self.free + (0 if self.kv else self.shared)
        self.core.observe(StepDone("w", tuple(rows), free, 1.0), self.now)
        return sum(not row.skipped for row in rows)

    def _rows(self, plan: Plan) -> list[Round]:
        rows: list[Round] = []
        for run in plan.schedule:
            if sum(not row.skipped for row in rows) == self.slots:
                break
            entry = self.core.fleet.entries[run.id]
            placement, had = self.kv.pop(run.id, (run.placement, 0))
            had = had if placement == run.placement else 0
            back = self.offloaded.get(run.id, 0)
            known = max(had, back, min(self.shared * SIZE, entry.tokens - 1) if self.kv else 0)
            lacking = entry.tokens - known - (entry.emitted > 0)
            drafts = 0 if lacking else run.draft_len
            while drafts and self.own(entry.tokens + drafts) > self.free:
                drafts -= 1
            if self.own(entry.tokens + drafts) > self.free:
                if had:
                    self.kv[run.id] = run.placement, had
                own = self.own(had)
                rows.append(Round(run.id, run.placement, entry.emitted, 0, 0, 0, 0, lacking, own, None, True))
                continue
            self.offloaded.pop(run.id, None)
            accepted = self.rng.randint(0, drafts)
            new = min(accepted + 1, self.lengths[run.id] - entry.emitted)
            after, finish = entry.tokens + new - 1, Finish.LENGTH
            if entry.emitted + new < self.lengths[run.id]:
                self.kv[run.id], finish = (run.placement, after), None
            counts = (new, drafts, min(accepted, new - 1), lacking, 0, 0 if finish else self.own(after))
            rows.append(Round(run.id, run.placement, entry.emitted, *counts, finish))
        return rows
