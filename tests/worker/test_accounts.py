"""Nothing leaks: blocks of the device and the host, and what drafters remember, over thousands of random operations."""

from collections import Counter
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.worker.harness import Tiny
from tests.worker.test_drafters import KINDS, make
from worker_service.engine.drafting.drafter import Drafter, FirstOf
from worker_service.engine.drafting.head_drafter import HeadDrafter
from worker_service.engine.drafting.model import ModelDrafter
from worker_service.engine.drafting.ngram import NgramDrafter
from worker_service.engine.engine import Engine
from worker_service.engine.types import Admission, Limits, Run, Sampling

NAMES = [str(i) for i in range(6)]
HOST_BLOCKS = 8
ACTIONS = ["admit", "replay", "step", "step", "step", "step", "offload", "drop", "forget"]


@pytest.mark.parametrize("kind", ["n-grams", *KINDS])
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(random=st.randoms(use_true_random=True))  # a seed: so many choices are too much to shrink
def test_nothing_leaks_however_requests_come_wait_and_go(tiny: Tiny, tmp_path: Path, kind: str, random: Random) -> None:
    drafter = NgramDrafter() if kind == "n-grams" else make(kind, tiny, tmp_path)
    # Memory for two or three of the six.
    engine = tiny.engine(blocks=12, block_tokens=4, host_blocks=HOST_BLOCKS, drafter=drafter)
    emitted = 0
    for _ in range(500):
        name, action = random.choice(NAMES), random.choice(ACTIONS)
        match action:
            case "admit":
                prompt = [random.choice([5, 6])] * random.randint(1, 30)  # texts often begin alike
                limits = Limits(max_tokens=random.randint(1, 16))
                sampling = Sampling(temperature=random.choice([0.0, 1.0]), seed=11)
                engine.admit(Admission(name, 1, prompt, len(prompt), sampling, limits, random.choice("ab")))
            case "replay":
                _replay(engine, name, random)
            case "step":
                order = random.sample(NAMES, len(NAMES))
                result = engine.step([Run(name, random.randint(0, 5), 16) for name in order], slots=3)
                emitted += sum(len(row.tokens) for row in result.rows)
            case "offload":
                engine.offload(name)
            case "drop":
                engine.drop(name)
            case "forget":
                engine.forget(name)
        _check_accounts(engine)
    assert emitted > 100
    for name in NAMES:
        engine.forget(name)
    _check_accounts(engine)
    assert engine.free_blocks == engine.blocks
    assert engine.host.free_blocks == HOST_BLOCKS
    _check_forgotten(drafter)


def _replay(engine: Engine, name: str, random: Random) -> None:
    """Admitted again with a part of its output, as after a broken link."""
    if known := engine._requests.get(name):
        tokens = known.tokens[: known.prompt_len + random.randint(0, known.output_tokens)]
        engine.admit(Admission(name, 2, tokens, known.prompt_len, known.sampling, known.limits))


def _check_accounts(engine: Engine) -> None:
    """Every block is free, or held as often as tables name it; of the host's memory each block is somebody's."""
    requests = engine._requests.values()
    named = Counter(block for request in requests for block in request.kv.table)
    assert [named[block] for block in range(engine.blocks)] == engine.pool.references
    assert engine.free_blocks == engine.blocks - len(named)
    assert engine.host.free_blocks == HOST_BLOCKS - sum(r.saved.blocks for r in requests if r.saved)


def _check_forgotten(drafter: Drafter) -> None:
    match drafter:
        case FirstOf():
            for part in drafter._drafters:
                _check_forgotten(part)
        case NgramDrafter():
            assert not drafter._indexes
        case HeadDrafter():
            assert not drafter._states
        case ModelDrafter():
            assert not drafter._states
            assert drafter._pool.free_blocks == drafter._pool.blocks
            assert not any(drafter._pool.references)
        case _:
            raise AssertionError(f"what does {drafter} remember?")
