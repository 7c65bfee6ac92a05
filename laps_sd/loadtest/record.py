"""What is noted of each request, and the totals that the progress bar shows. Computes no statistics."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Record:
    """One request as the driver saw it. Times are seconds after the start of the run.

    `due_s`: when it was due; all latencies count from here. `free_s`: when the cap on concurrency allowed it; equal to
    `due_s` if it did not have to wait. `outputs`: (time, tokens) of each streamed output. `rounds`: (tokens, drafted,
    accepted) of each round.
    """

    index: int
    due_s: float
    free_s: float
    category: str = ""
    measured: bool = True
    sent_s: float = 0.0
    end_s: float = 0.0
    outputs: list[tuple[float, int]] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str = ""
    error: str = ""  # why it failed, status first; empty if it completed
    request_id: str = ""
    queue_ms: float = 0.0  # measured by the server
    preemptions: int = 0
    rounds: list[tuple[int, int, int]] = field(default_factory=list)
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def completed(self) -> bool:
        return not self.error

    @property
    def ttft_s(self) -> float:
        """Time to first token: until the first output, or until the end if there was none."""
        return (self.outputs[0][0] if self.outputs else self.end_s) - self.due_s

    @property
    def e2el_s(self) -> float:
        return self.end_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None if there was at most one."""
        if self.output_tokens < 2:
            return None
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        """Inter-token latencies: gaps between streamed outputs, each of which has one or more tokens."""
        return [after[0] - before[0] for before, after in zip(self.outputs, self.outputs[1:], strict=False)]

    @property
    def pause_s(self) -> float:
        """The longest gap between two streamed outputs; 0 if there were fewer than two."""
        return max(self.itls_s, default=0.0)

    @property
    def lateness_s(self) -> float:
        """How much later than allowed it was sent: the driver's fault, not the server's."""
        return self.sent_s - self.free_s


@dataclass(slots=True)
class Tally:
    """Totals up to now. Those of several drivers can be added."""

    sent: int = 0
    completed: int = 0
    failed: int = 0
    tokens: int = 0
    e2el_s: float = 0.0  # sum

    def ended(self, record: Record) -> None:
        self.completed += record.completed
        self.failed += not record.completed
        if record.completed:
            self.tokens += record.output_tokens
            self.e2el_s += record.e2el_s

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))
