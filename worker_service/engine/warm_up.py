"""Warm-up: what steps cost on this machine, measured on the engine itself, any that fills the port. It leaves nothing
admitted."""

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

from worker_service.engine.port import EnginePort
from worker_service.engine.types import Admission, CostProfile, Limits, Run, Sampling, StepResult

_PROMPT = 64
WARM_UP_TOKENS = 3 * _PROMPT  # of each request: its prompt and what its rounds emit at most
_DRAFTS = 4
_OWN_DRAFTS = (1, 2, 4, 8)  # of one request: from how many rows on a pass takes longer differs much between machines
_REPETITIONS = 3
_OFFLOADED = 8  # blocks copied at a time
_LIMITS = Limits(max_tokens=1 << 20, ignore_eos=True)


class Measured(NamedTuple):
    profile: CostProfile
    passes: dict[int, float]  # seconds of a pass by its rows, at some of them


def measure(engine: EnginePort, slots: int) -> Measured:
    """Time prefills, and steps of one request and of `slots`, without drafts and with. The engine must hold no request.

    Of a few repetitions the fastest counts, for a busy machine only ever adds time. With a small model all of it takes
    less than two seconds. With memory for fewer requests than `slots` the slope comes from those that fit.
    """
    engine.weigh_drafts(None)  # as many as are asked for: else hardly any would be drafted of this prompt
    batch = max(min(slots, engine.blocks // -(-WARM_UP_TOKENS // engine.block_tokens)), 1)
    names = [f"warm-up-{i}" for i in range(batch)]
    prompt = [token % engine.vocab_size for token in (1, 2, 3, 4)] * (_PROMPT // 4)  # n-gram drafters propose here
    prefills = []
    for name in names:
        # With salts of their own none shares another's prefill.
        engine.admit(Admission(name, 0, prompt, len(prompt), Sampling(), _LIMITS, salt=name))
        prefills.append(_timed_step(engine, [name], 0)[0])
    _steps(engine, names, _DRAFTS)  # the first passes pay for allocations
    alone = _steps(engine, names[:1], 0)
    together = _steps(engine, names, 0)
    drafting = _steps(engine, names, _DRAFTS)
    own = [_steps(engine, names[:1], count) for count in _OWN_DRAFTS]
    for name in names:
        engine.forget(name)
    passes = {batch + drafting.drafted: drafting.verify_s, batch: together.verify_s, 1: alone.verify_s}
    profile = CostProfile(
        draft_s=max(drafting.draft_s, _drafting(engine, batch)),
        verify_s=alone.verify_s,
        verify_slope_s=max(together.verify_s - alone.verify_s, 0.0) / max(batch - 1, 1),
        prefill_token_s=min(prefills) / _PROMPT,
        verify_token_s=max(drafting.verify_s - together.verify_s, 0.0) / (drafting.drafted or 1),
        offload_block_s=_offloading(engine) if engine.host_blocks else 0.0,
    )
    return Measured(profile, passes | {1 + each.drafted: each.verify_s for each in own if each.drafted})


class _Steps(NamedTuple):
    """The fastest of those that drafted most: seconds of all but drafting, and of each position drafted; tokens
    drafted."""

    verify_s: float
    draft_s: float
    drafted: int


def _steps(engine: EnginePort, names: list[str], drafts: int) -> _Steps:
    steps = [_timed_step(engine, names, drafts) for _ in range(_REPETITIONS)]
    drafted = [sum(row.drafted for row in result.rows) for _, result in steps]
    steps = [step for step, count in zip(steps, drafted, strict=True) if count == max(drafted)]
    return _Steps(
        min(total_s - result.draft_s - result.wait_s for total_s, result in steps),
        min(result.draft_s for _, result in steps) / max(drafts, 1),
        max(drafted),
    )


def _timed_step(engine: EnginePort, names: list[str], drafts: int) -> tuple[float, StepResult]:
    begun = perf_counter()
    result = engine.step([Run(name, drafts, _PROMPT) for name in names], len(names))
    return perf_counter() - begun, result


def _drafting(engine: EnginePort, batch: int) -> float:
    """Seconds for each position, of a drafter that might spare itself the work in the steps measured above."""
    return _least_s(lambda: engine.rehearse_drafts(batch, _DRAFTS)) / _DRAFTS


def _offloading(engine: EnginePort) -> float:
    """Seconds for each block of KV that is copied to the host's memory and back."""
    blocks = min(_OFFLOADED, engine.blocks)
    return _least_s(lambda: engine.rehearse_offload(blocks)) / blocks


def _least_s(work: Callable[[], None]) -> float:
    times = []
    for _ in range(_REPETITIONS):
        begun = perf_counter()
        work()
        times.append(perf_counter() - begun)
    return min(times)
