"""Warm-up: what rounds cost on this machine, measured on the engine itself. It leaves nothing admitted."""

from time import perf_counter

from worker_service.engine.engine import Engine
from worker_service.engine.types import CostProfile, Limits, Run, Sampling

_PROMPT = 64
_DRAFTS = 4
_ROUNDS = 5
_LIMITS = Limits(max_tokens=1 << 20, ignore_eos=True)


def measure(engine: Engine, slots: int) -> CostProfile:
    """Time prefills, and rounds of one request and of `slots`, with drafts. The engine must hold no requests.

    The least of a few rounds each, for a busy machine only ever adds; under two seconds with a small model. With memory
    for fewer requests than `slots` the slope comes from those that fit.
    """
    batch = max(min(slots, engine.blocks // engine.blocks_for(3 * _PROMPT)), 1)
    names = [f"warm-up-{i}" for i in range(batch)]
    prompt = [token % engine.vocab_size for token in (1, 2, 3, 4)] * (_PROMPT // 4)  # n-gram drafters propose here
    prefills = []
    for name in names:
        engine.admit(name, 0, prompt, len(prompt), Sampling(), _LIMITS)
        prefills.append(_timed_round(engine, [name])[0])
    _rounds(engine, names)  # the first passes pay for allocations
    alone_s, draft_s = _rounds(engine, names[:1])
    together_s, _ = _rounds(engine, names)
    for name in names:
        engine.forget(name)
    return CostProfile(
        draft_s=draft_s,
        verify_s=alone_s,
        verify_slope_s=max(together_s - alone_s, 0.0) / max(batch - 1, 1),
        prefill_token_s=min(prefills) / _PROMPT,
    )


def _rounds(engine: Engine, names: list[str]) -> tuple[float, float]:
    """The least of a few rounds: seconds without drafting, and seconds of drafting per position and request."""
    rounds = [_timed_round(engine, names) for _ in range(_ROUNDS)]
    return min(total - draft for total, draft in rounds), min(draft for _, draft in rounds) / (_DRAFTS * len(names))


def _timed_round(engine: Engine, names: list[str]) -> tuple[float, float]:
    begun = perf_counter()
    result = engine.step([Run(name, _DRAFTS, _PROMPT) for name in names], len(names))
    return perf_counter() - begun, result.draft_s
