"""The head that comes with LAPS-SD, on the real model: it is right often enough, and the text stays the target's."""

import pytest
import torch

from tests.worker.harness import Driver
from worker_service.drafters import make_drafter
from worker_service.engine.draft import FirstOf
from worker_service.engine.engine import Engine
from worker_service.engine.types import Limits
from worker_service.models import load
from worker_service.pull import pull

QUESTIONS = [
    "Write a Python function that returns the n-th Fibonacci number.",
    "A shop sells 12 apples a day. How many apples does it sell in a week? Think step by step.",
    "What are the benefits of reading books?",
]
TOKENS = 64
CLEAR = 1e-3  # closer than this, the two best logits may swap places in float32 sums of another shape


@pytest.mark.model
def test_the_bundled_head_is_often_right_and_changes_nothing() -> None:
    folder = str(pull("smollm2-135m"))
    target, reference = load(folder, "cpu", "float32"), load(folder, "cpu", "float32").model
    drafter = make_drafter("default", target, blocks=1, block_tokens=1)
    assert isinstance(drafter, FirstOf)
    engine = Engine(
        target.model,
        target.tokenizer,
        eos_ids=target.eos_ids,
        context_tokens=512,
        blocks=64,
        block_tokens=16,
        drafter=drafter,
    )
    driver = Driver(engine)
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        text = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt = target.tokenizer(text, add_special_tokens=False).input_ids
        driver.admit(question, prompt, Limits(max_tokens=TOKENS))
    driver.finish_all(draft_len=lambda n: n % 6, prefill_tokens=512)
    for question in QUESTIONS:
        prompt, output = driver.admitted[question][0], driver.outputs[question]
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2).values
        clear = best[:, 0] - best[:, 1] > CLEAR
        chosen = logits.argmax(-1)
        assert [t for t, c in zip(output, clear.tolist(), strict=True) if c] == chosen[clear].tolist()
    drafted, accepted = (sum(getattr(row, name) for row in driver.rows) for name in ("drafted", "accepted"))
    assert accepted > 0.4 * drafted > 30
