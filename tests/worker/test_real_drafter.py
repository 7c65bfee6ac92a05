"""The head that comes with LAPS-SD, on the real model: it is right often enough, and twelve texts stay the target's."""

from random import Random

import pytest

from tests.prompts import two_hundred
from tests.worker.harness import Driver, greedy_differences
from worker_service.drafters import make_drafter
from worker_service.engine.drafting.drafter import FirstOf
from worker_service.engine.engine import Engine
from worker_service.engine.types import Finish, Limits
from worker_service.models import load
from worker_service.prompts import encode
from worker_service.pull import pull

TOKENS = 24


@pytest.mark.model
def test_the_bundled_head_is_often_right_and_changes_nothing() -> None:
    folder = str(pull("smollm2-135m"))
    target, reference = load(folder, "cpu", "float32"), load(folder, "cpu", "float32").model
    drafter = make_drafter("default", target, blocks=80, block_tokens=16)
    assert isinstance(drafter, FirstOf)
    engine = Engine(
        target.model,
        target.tokenizer,
        eos_ids=target.eos_ids,
        context_tokens=1024,
        blocks=80,  # of the longest prompts not all fit
        block_tokens=16,
        host_blocks=40,
        drafter=drafter,
    )
    driver = Driver(engine)
    for prompt in two_hundred()[::17]:
        driver.admit(prompt, encode(target.tokenizer, prompt), Limits(max_tokens=TOKENS))
    assert len(driver.admitted) == 12
    driver.disturb(Random(3), actions=40, slots=12)
    assert all(driver.preempted[kind] for kind in ("keep", "offload", "drop"))
    driver.finish_in_little_memory()
    for name, (prompt, _, _) in driver.admitted.items():
        assert not greedy_differences(reference, prompt, driver.outputs[name]), name
        assert len(driver.outputs[name]) == TOKENS or driver.finished[name] is Finish.STOP
    drafted, accepted = (sum(getattr(row, name) for row in driver.rows) for name in ("drafted", "accepted"))
    assert drafted > 30
    assert accepted > 0.4 * drafted
