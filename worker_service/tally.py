"""What the steps of this process did so far, counted in the model's thread, a step at a time. It decides nothing."""

from collections import Counter

from worker_service.engine.types import StepResult
from worker_service.reporting import NO_TIME, Seconds


class Tally:
    def __init__(self) -> None:
        self.steps = self.running = 0  # `running`: requests of the last step
        self.seconds = NO_TIME
        self.longest_wait_s = 0.0  # of a step, for drafts from elsewhere
        self.tokens = self.prefilled = 0
        self.drafted: Counter[int] = Counter()  # rounds by how many tokens they drafted
        self.accepted: Counter[int] = Counter()  # rounds by how many of them were accepted
        self.apart = [0, 0]  # tokens drafted by another process, and those of them that were accepted
        self.free_blocks: int | None = None  # None: no step ran yet

    def add(self, result: StepResult, seconds: Seconds) -> None:
        """A step, and how long its parts took."""
        self.steps += 1
        self.seconds = Seconds(*map(sum, zip(self.seconds, seconds, strict=True)))
        self.longest_wait_s = max(self.longest_wait_s, seconds.wait)
        self.free_blocks, self.running = result.free_blocks, 0
        for row in result.rows:
            if row.skipped is None:
                self.running += 1
                self.tokens += len(row.tokens)
                self.prefilled += row.prefilled
                self.drafted[row.drafted] += 1
                self.accepted[row.accepted] += 1
                if row.request_id in result.apart:
                    self.apart = [self.apart[0] + row.drafted, self.apart[1] + row.accepted]


def reached(rounds: Counter[int]) -> list[int]:
    """How many rounds got to each draft position, the first one first. `rounds`: by how many tokens each had."""
    counts = []
    total = 0
    for position in range(max(rounds, default=0), 0, -1):
        total += rounds[position]
        counts.append(total)
    return counts[::-1]
