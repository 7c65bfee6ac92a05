"""How good a drafter is on text that it has not learned from: acceptance as the engine would measure it."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from worker_service.distill.data import Sample
from worker_service.engine.drafting.drafter import Ask, Drafter, Seen, Verified

LONGEST = 8


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What rounds with up to `LONGEST` drafts showed. Index j of each list stands for draft length j + 1."""

    rounds: list[int]
    drafted: list[int]
    accepted: list[int]
    by_position: list[float]  # share of the rounds of length LONGEST in which draft j and all before it were right

    def per_drafted(self, length: int) -> float:
        """Chained acceptance: accepted tokens per drafted token."""
        return self.accepted[length - 1] / max(self.drafted[length - 1], 1)

    def per_round(self, length: int) -> float:
        """Output tokens per round: the accepted ones and the target's own."""
        return 1 + self.accepted[length - 1] / max(self.rounds[length - 1], 1)


def measure(
    drafter: Drafter,
    samples: Iterable[Sample],
    hidden: Callable[[Sample], torch.Tensor],
    progress: Callable[[], None] = lambda: None,
    states: Callable[[Sample], torch.Tensor] | None = None,
) -> dict[str, Acceptance]:
    """Replay the samples' output in rounds, at each draft length; by category, and under `all`.

    `hidden`: the target's hidden states [output tokens, hidden size] from which it chose the sample's output;
    `states`: what it knew at all positions in the drafter's layers, if it has any.
    """
    totals: dict[str, list[_Tally]] = defaultdict(lambda: [_Tally() for _ in range(LONGEST)])
    for sample in samples:
        drafts = _all_drafts(drafter, sample, hidden(sample), states(sample) if states else None)
        for length, tallies in enumerate(zip(totals[sample.category], totals["all"], strict=True), 1):
            for tally in tallies:
                tally.replay(sample.output, drafts, length)
        progress()
    return {category: _acceptance(tallies) for category, tallies in sorted(totals.items())}


def _all_drafts(drafter: Drafter, sample: Sample, hidden: torch.Tensor, states: torch.Tensor | None) -> list[list[int]]:
    """What the drafter would propose after each token of the sample's output."""
    drafts, read = [], 0
    for i in range(1, len(sample.output) + 1):
        tokens = sample.prompt + sample.output[:i]
        drafter.verified([Verified(sample.id, tokens, hidden[i - 1])])
        ask = Ask(sample.id, tokens, LONGEST)
        if states is not None:
            drafter.read([Seen(ask, read, states[read : len(tokens) - 1])])
            read = len(tokens) - 1
        drafts.extend(drafter.propose([ask]))
    drafter.forget(sample.id)
    return drafts


class _Tally:
    def __init__(self) -> None:
        self.rounds = self.drafted = self.accepted = 0
        self.right = [0] * LONGEST

    def replay(self, output: Sequence[int], drafts: Sequence[Sequence[int]], length: int) -> None:
        """In rounds as the engine runs them: accepted drafts and one token more. The first token needs no round."""
        known = 1
        while known < len(output):
            proposed = drafts[known - 1][: min(length, len(output) - known)]
            accepted = 0
            while accepted < len(proposed) and proposed[accepted] == output[known + accepted]:
                self.right[accepted] += 1
                accepted += 1
            self.rounds += 1
            self.drafted += len(proposed)
            self.accepted += accepted
            known += accepted + 1


def _acceptance(tallies: Sequence[_Tally]) -> Acceptance:
    longest = tallies[-1]
    return Acceptance(
        [t.rounds for t in tallies],
        [t.drafted for t in tallies],
        [t.accepted for t in tallies],
        [right / max(longest.rounds, 1) for right in longest.right],
    )
