"""The promise on the real model: twelve prompts at once, through the whole stack, greedy, token for token."""

import asyncio
from pathlib import Path

import pytest

from laps_sd.client import Client, Completion
from tests.e2e.reference import Reference
from tests.e2e.stack import running_stack
from worker_service.pull import resolve

MODEL = "smollm2-135m"
PROMPTS = [
    ("What is the capital of France?", 24),
    ("Write a Python function that reverses a string.", 60),
    ("A train travels 60 km in 45 minutes. What is its speed in km/h?", 70),
    ("List the days of the week.", 40),
    ("Explain photosynthesis to a child.", 60),
    ("Repeat five times: the queue is short.", 50),
    ("Translate 'good morning' into Spanish.", 16),
    ("def fibonacci(n):", 60),
    ("Who wrote Romeo and Juliet?", 24),
    ("Count from 1 to 20, separated by commas.", 60),
    ("Write a haiku about rivers.", 30),
    ("If x + 3 = 10, what is x?", 40),
]


@pytest.mark.model
@pytest.mark.timeout(300)
async def test_twelve_prompts_at_once_give_the_text_of_transformers(tmp_path: Path) -> None:
    async def answer(client: Client, prompt: str, max_tokens: int) -> Completion:
        messages = [{"role": "user", "content": prompt}]
        return await client.complete(messages=messages, max_tokens=max_tokens, temperature=0)

    path = resolve(MODEL)
    async with running_stack(path, tmp_path, "--workers", "2", "--slots", "2") as stack, Client(stack.grpc) as client:
        answers = await asyncio.gather(*(answer(client, *prompt) for prompt in PROMPTS))
    reference = Reference(path)
    assert sum(answer.preemptions for answer in answers) > 0, "nothing was preempted: the test shows less than it says"
    assert sum(answer.spec_decode.num_accepted_tokens for answer in answers) > 0
    for (prompt, max_tokens), answered in zip(PROMPTS, answers, strict=True):
        ids = reference.chat(prompt)
        assert answered.usage["prompt_tokens"] == len(ids)
        assert reference.same(ids, answered.token_ids, max_tokens), prompt
        assert answered.text == reference.tokenizer.decode(answered.token_ids, skip_special_tokens=True)
