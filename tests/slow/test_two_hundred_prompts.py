"""Two hundred real prompts on the real model in float32, disturbed in every way: each text is transformers' own."""

from collections import Counter
from random import Random

import pytest
import torch

from tests.prompts import two_hundred
from tests.worker.harness import Driver, greedy_differences
from worker_service.drafters import make_drafter
from worker_service.engine.engine import Engine
from worker_service.engine.types import Limits
from worker_service.models import load
from worker_service.prompts import encode
from worker_service.pull import pull

BATCHES = [*range(1, 17), 16, 16, 16, 16]  # two hundred
TOKENS = 64
BLOCK_TOKENS = 16
GENERATED_EVERY = (
    10  # for so many `generate` is run too; elsewhere one pass of the reference over the text says the same
)


@pytest.mark.model
@pytest.mark.timeout(3600)
def test_greedy_text_is_that_of_generate_however_it_is_batched_drafted_and_preempted() -> None:
    folder = str(pull("smollm2-135m"))
    target, reference = load(folder, "cpu", "float32"), load(folder, "cpu", "float32").model
    engine = Engine(
        target.model,
        target.tokenizer,
        eos_ids=target.eos_ids,
        context_tokens=1024,
        blocks=120,  # 1920 tokens for up to sixteen requests, the longest of which need 500: they run out
        block_tokens=BLOCK_TOKENS,
        host_blocks=60,
        drafter=make_drafter("default", target, blocks=120, block_tokens=BLOCK_TOKENS),
    )
    prompts, random = two_hundred(), Random(4)
    random.shuffle(prompts)
    counts: Counter[str] = Counter()
    for batch in BATCHES:
        driver = Driver(engine)
        for prompt in [prompts.pop() for _ in range(batch)]:
            driver.admit(prompt, encode(target.tokenizer, prompt), Limits(max_tokens=TOKENS))
        driver.disturb(random, actions=50, slots=batch)
        driver.finish_in_little_memory()
        for name, (ids, _, _) in driver.admitted.items():
            output = driver.outputs[name]
            assert not greedy_differences(reference, ids, output), name
            assert len(output) == TOKENS or output[-1] in target.eos_ids, name
            counts["prompts"] += 1
            if counts["prompts"] % GENERATED_EVERY == 0:
                given = torch.tensor([ids])
                theirs = reference.generate(given, max_new_tokens=TOKENS, do_sample=False)[0, len(ids) :].tolist()
                assert theirs == output or not greedy_differences(reference, ids, theirs)
                counts["equal to generate, tie or not"] += theirs == output
        driver.forget_all()
        counts.update(driver.preempted)
        for row in driver.rows:
            counts.update(tokens=len(row.tokens), drafted=row.drafted, accepted=row.accepted)
            counts["waited for blocks"] += row.skipped is not None
    print(dict(counts))  # noqa: T201
    assert not prompts
    for what in ("keep", "offload", "drop", "waited for blocks"):
        assert counts[what] > 20
    assert counts["accepted"] > 1000
