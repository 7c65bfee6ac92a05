"""Warm-up: what rounds cost on this machine, measured on the engine itself. It leaves nothing admitted."""

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

from worker_service.engine.engine import Engine
from worker_service.engine.types import CostProfile, Limits, Run, Sampling, StepResult

_PROMPT = 64
WARM_UP_TOKENS = 3 * _PROMPT  # of each request: the prompt and what its rounds emit at most
_DRAFTS = 4
_ROUNDS = 5
_OFFLOADED = 8  # blocks copied at a time
_LIMITS = Limits(max_tokens=1 << 20, ignore_eos=True)


def measure(engine: Engine, slots: int) -> CostProfile:
    """Time prefills, and rounds of one request and of `slots`, without drafts and with. The engine must hold none.

    The least of a few rounds each, for a busy machine only ever adds; under two seconds with a small model. With memory
    for fewer requests than `slots` the slope comes from those that fit.
    """
    batch = max(min(slots, engine.blocks // engine.blocks_for(WARM_UP_TOKENS)), 1)
    names = [f"warm-up-{i}" for i in range(batch)]
    prompt = [token % engine.vocab_size for token in (1, 2, 3, 4)] * (_PROMPT // 4)  # n-gram drafters propose here
    prefills = []
    for name in names:
        engine.admit(name, 0, prompt, len(prompt), Sampling(), _LIMITS, salt=name)  # each prefill in full
        prefills.append(_timed_round(engine, [name], 0)[0])
    _rounds(engine, names, _DRAFTS)  # the first passes pay for allocations
    alone = _rounds(engine, names[:1], 0)
    together = _rounds(engine, names, 0)
    drafting = _rounds(engine, names, _DRAFTS)
    for name in names:
        engine.forget(name)
    return CostProfile(
        draft_s=max(drafting.draft_s, _rehearsal(engine, batch)),
        verify_s=alone.verify_s,
        verify_slope_s=max(together.verify_s - alone.verify_s, 0.0) / max(batch - 1, 1),
        prefill_token_s=min(prefills) / _PROMPT,
        verify_token_s=max(drafting.verify_s - together.verify_s, 0.0) / (drafting.drafted or 1),
        offload_block_s=_offloading(engine) if engine.host_blocks else 0.0,
    )


class _Rounds(NamedTuple):
    """The least of a few: seconds of all but drafting, and of drafting per position; tokens drafted a round."""

    verify_s: float
    draft_s: float
    drafted: float


def _rounds(engine: Engine, names: list[str], drafts: int) -> _Rounds:
    rounds = [_timed_round(engine, names, drafts) for _ in range(_ROUNDS)]
    return _Rounds(
        min(total_s - result.draft_s for total_s, result in rounds),
        min(result.draft_s for _, result in rounds) / max(drafts, 1),
        sum(row.drafted for _, result in rounds for row in result.rows) / _ROUNDS,
    )


def _rehearsal(engine: Engine, batch: int) -> float:
    """Seconds a draft position, of a drafter that may spare itself the work in the rounds measured here."""
    return _least(lambda: engine.rehearse_drafts(batch, _DRAFTS)) / _DRAFTS


def _offloading(engine: Engine) -> float:
    """Seconds a block."""
    blocks = min(_OFFLOADED, engine.blocks)
    return _least(lambda: engine.rehearse_offload(blocks)) / blocks


def _least(work: Callable[[], None]) -> float:
    """Seconds, of a few attempts."""
    times = []
    for _ in range(_ROUNDS):
        begun = perf_counter()
        work()
        times.append(perf_counter() - begun)
    return min(times)


def _timed_round(engine: Engine, names: list[str], drafts: int) -> tuple[float, StepResult]:
    begun = perf_counter()
    result = engine.step([Run(name, drafts, _PROMPT) for name in names], len(names))
    return perf_counter() - begun, result
