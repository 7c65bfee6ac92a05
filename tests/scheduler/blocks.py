"""A worker without a model whose KV fills blocks as the engine's does: without the last token of the output, the first
blocks shared among requests of one kind, and a request for which there is no block is skipped."""

from random import Random

from scheduler_service.core.core import Core
from scheduler_service.core.types import Finish, Plan, Round, StepDone
from tests.scheduler.builders import worker_up

SIZE = 16  # tokens of a block


def blocks(tokens: int) -> int:
    return -(-tokens // SIZE)


class BlockWorker:
    """`lengths`: of each request's output. `shared`: the tokens that all prompts begin with."""

    def __init__(self, core: Core, lengths: dict[str, int], total: int, slots: int, shared: int, rng: Random) -> None:
        self.core, self.lengths, self.slots, self.rng = core, lengths, slots, rng
        self.total, self.shared = total, shared // SIZE
        self.kv: dict[str, tuple[int, int]] = {}  # by request: placement, tokens
        self.now = 0.0
        core.observe(worker_up(slots=slots, blocks=total), 0.0)

    @property
    def free(self) -> int:
        common = self.shared if self.kv else 0
        return self.total - common - sum(self.private(tokens) for _, tokens in self.kv.values())

    def private(self, tokens: int) -> int:
        return max(0, blocks(tokens) - self.shared)

    def step(self) -> int:
        """A plan, and the round that follows. Returns how many requests ran."""
        plan = self.core.plan("w")
        for id in [*plan.drop, *(id for id in self.kv if id not in self.core.fleet.entries)]:
            self.kv.pop(id, None)
        rows = self._rows(plan)
        self.now += 1
        self.core.observe(StepDone("w", tuple(rows), self.free, 1.0), self.now)
        return sum(not row.skipped for row in rows)

    def _rows(self, plan: Plan) -> list[Round]:
        rows: list[Round] = []
        for run in plan.schedule:
            if sum(not row.skipped for row in rows) == self.slots:
                break
            entry = self.core.fleet.entries[run.id]
            placement, had = self.kv.get(run.id, (run.placement, 0))
            had = had if placement == run.placement else 0
            self.kv.pop(run.id, None)
            # What others hold of the common beginning need not be computed, nor kept twice.
            known = max(had, min(self.shared * SIZE, entry.tokens - 1) if self.kv else 0)
            lacking = entry.tokens - known - (entry.emitted > 0)
            room = self.free - (0 if self.kv else self.shared)
            drafts = min(run.draft_len, 4) if not lacking else 0
            while drafts and self.private(entry.tokens + drafts) > room:
                drafts -= 1
            if self.private(entry.tokens + drafts) > room:
                if had:
                    self.kv[run.id] = run.placement, had
                own = self.private(had)
                rows.append(Round(run.id, run.placement, entry.emitted, 0, 0, 0, 0, lacking, own, None, True))
                continue
            accepted = self.rng.randint(0, drafts)
            new = min(accepted + 1, self.lengths[run.id] - entry.emitted)
            after = entry.tokens + new - 1
            done = entry.emitted + new == self.lengths[run.id]
            if not done:
                self.kv[run.id] = run.placement, after
            finish = Finish.LENGTH if done else None
            counts = (new, drafts, min(accepted, new - 1), lacking, 0, 0 if done else self.private(after))
            rows.append(Round(run.id, run.placement, entry.emitted, *counts, finish))
        return rows
