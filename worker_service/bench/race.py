"""Systems that answer the same prompts in turn, so that a busy machine is as busy for all. Who they are is not here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Batch = Sequence[Sequence[int]]  # token ids of prompts that are answered at once


@dataclass(frozen=True, slots=True)
class Rounds:
    """Decode rounds of one or several answers; those with prefill in them are left out. Times in seconds."""

    passes: int = 0  # rounds of the whole batch
    rows: int = 0  # the same, counted once for each request that took part
    tokens: int = 0
    drafted: int = 0
    branched: int = 0  # beside those: see Row
    accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0  # neither drafting nor the target's forward pass

    def __add__(self, other: "Rounds") -> "Rounds":
        return Rounds(*(getattr(self, name) + getattr(other, name) for name in Rounds.__slots__))

    @property
    def seconds(self) -> float:
        return self.draft_s + self.verify_s + self.other_s

    @property
    def acceptance_length(self) -> float:
        """Output tokens of a request's round: those accepted and one of the target's own."""
        return self.tokens / max(self.rows, 1)

    @property
    def accepted_per_drafted(self) -> float:
        return self.accepted / max(self.drafted, 1)

    @property
    def outside_share(self) -> float:
        """Of a round, spent in neither the drafter nor the target's forward pass."""
        return self.other_s / self.seconds if self.passes else 0.0

    @property
    def draft_token_share(self) -> float:
        """What a proposed token costs, in verify passes."""
        return (self.draft_s / self.drafted) / (self.verify_s / self.passes) if self.drafted else 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What one system made of one batch. `seconds`: from the prompts to the last token, prefill included."""

    outputs: list[list[int]]
    seconds: float
    rounds: Rounds = field(default_factory=Rounds)  # empty: it does not tell

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))


class System(Protocol):
    def answer(self, batch: Batch, max_tokens: int) -> Answer:
        """Greedy, `max_tokens` for each prompt."""


def race(
    systems: Mapping[str, System],
    batches: Sequence[Batch],
    max_tokens: int,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, list[Answer]]:
    """Each system answers a batch before the next batch's turn; another one begins each time."""
    answers: dict[str, list[Answer]] = {name: [] for name in systems}
    for number, batch in enumerate(batches):
        for place in range(len(systems)):
            name = list(systems)[(number + place) % len(systems)]
            answers[name].append(systems[name].answer(batch, max_tokens))
            progress()
    return answers
