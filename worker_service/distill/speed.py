"""How much time a drafter saves: an engine answers the same prompts with and without it in turn, one at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from worker_service.bench.race import Answer, Batch, Rounds, race
from worker_service.bench.systems import Ours
from worker_service.engine.drafting.drafter import Drafter
from worker_service.engine.drafting.shielded import Shielded
from worker_service.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Speed:
    """Medians over the prompts; greedy, batch 1, prefill not counted."""

    tokens_per_s: float
    verify_ms: float  # for each of the target's passes
    draft_ms: float  # for each draft token that was proposed; 0: none was
    accepted_per_drafted: float  # over all prompts
    tokens_per_round: float  # over all prompts


class _Drafted(Ours):
    """An engine that has this drafter for as long as it answers: one copy of the target is enough for all."""

    def __init__(self, engine: Engine, drafter: Drafter, draft_len: int) -> None:
        super().__init__(engine, draft_len, ignore_eos=False)
        self._drafter = Shielded(drafter)

    def answer(self, batch: Batch, max_tokens: int) -> Answer:
        self._engine.drafter = self._drafter
        return super().answer(batch, max_tokens)


def compare(
    engine: Engine,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    draft_len: int,
    progress: Callable[[], None],
) -> dict[str, Speed]:
    """`engine`: made with the one of `drafters` that reads layers of the target, if any does. All passes
    then hand these out, which makes them a few percent slower than those of an engine without that drafter."""
    systems = {name: _Drafted(engine, drafter, draft_len) for name, drafter in drafters.items()}
    answers = race(systems, [[prompt] for prompt in prompts], max_tokens, progress)
    return {
        name: _speed([answer.rounds for answer in given if answer.rounds.passes]) for name, given in answers.items()
    }


def _speed(answers: Sequence[Rounds]) -> Speed:
    total = sum(answers, Rounds())
    return Speed(
        tokens_per_s=median(a.tokens / a.seconds for a in answers),
        verify_ms=1e3 * median(a.verify_s / a.passes for a in answers),
        draft_ms=1e3 * median([a.draft_s / a.drafted for a in answers if a.drafted] or [0.0]),
        accepted_per_drafted=total.accepted_per_drafted,
        tokens_per_round=total.acceptance_length,
    )
