"""What a drafter brings in seconds: engines with and without it answer the same prompts in turn, one at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from worker_service.engine.engine import Engine
from worker_service.engine.types import Limits, Run, Sampling

_PREFILL_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Speed:
    """Medians over the prompts; greedy, batch 1, prefill not counted."""

    tokens_per_s: float
    verify_ms: float  # a target pass
    draft_ms: float  # a draft token that was proposed; 0: none was
    accepted_per_drafted: float  # over all prompts
    tokens_per_round: float  # over all prompts

    def as_row(self) -> dict[str, float]:
        return asdict(self)


def race(
    engines: Mapping[str, Engine],
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    draft_len: int,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, Speed]:
    """Each engine answers a prompt before the next prompt's turn, so that a busy machine is as busy for all."""
    runs: dict[str, list[_Answer]] = {name: [] for name in engines}
    for number, prompt in enumerate(prompts):
        for name, engine in engines.items():
            runs[name].append(_answer(engine, f"{name}-{number}", prompt, max_tokens, draft_len))
            progress()
    return {name: _speed([answer for answer in answers if answer.rounds]) for name, answers in runs.items()}


@dataclass(slots=True)
class _Answer:
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0


def _answer(engine: Engine, name: str, prompt: Sequence[int], max_tokens: int, draft_len: int) -> _Answer:
    answer = _Answer()
    engine.admit(name, 0, prompt, len(prompt), Sampling(), Limits(max_tokens))
    finished = False
    while not finished:
        result = engine.step([Run(name, draft_len, _PREFILL_TOKENS)], 1)
        (row,) = result.rows
        finished = row.finish is not None
        if row.prefilled == 0:
            answer.tokens += len(row.tokens)
            answer.rounds += 1
            answer.drafted += row.drafted
            answer.accepted += row.accepted
            answer.draft_s += result.draft_s
            answer.verify_s += result.verify_s
            answer.other_s += result.other_s
    engine.forget(name)
    return answer


def _speed(answers: Sequence[_Answer]) -> Speed:
    drafted, rounds = sum(a.drafted for a in answers), sum(a.rounds for a in answers)
    return Speed(
        tokens_per_s=median(a.tokens / (a.draft_s + a.verify_s + a.other_s) for a in answers),
        verify_ms=1e3 * median(a.verify_s / a.rounds for a in answers),
        draft_ms=1e3 * median([a.draft_s / a.drafted for a in answers if a.drafted] or [0.0]),
        accepted_per_drafted=sum(a.accepted for a in answers) / max(drafted, 1),
        tokens_per_round=sum(a.tokens for a in answers) / max(rounds, 1),
    )
