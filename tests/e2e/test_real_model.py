"""The promise on the real model: twelve prompts at once, through the whole stack, greedy, token for token."""

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from laps_sd.client import AsyncClient, Collector, Completion
from tests.e2e.stack import running_stack
from tests.worker.harness import greedy_differences
from worker_service.pull import resolve

MODEL = "smollm2-135m"
LONG = [  # as many as there are slots
    ("Explain photosynthesis to a child.", 60),
    ("Write a Python function that reverses a string.", 60),
    ("A train travels 60 km in 45 minutes. What is its speed in km/h?", 70),
    ("def fibonacci(n):", 60),
]
SHORT = [
    ("What is the capital of France?", 24),
    ("List the days of the week.", 40),
    ("Repeat five times: the queue is short.", 50),
    ("Translate 'good morning' into Spanish.", 16),
    ("Who wrote Romeo and Juliet?", 24),
    ("Count from 1 to 20, separated by commas.", 40),
    ("Write a haiku about rivers.", 30),
    ("If x + 3 = 10, what is x?", 40),
]


@pytest.mark.model
async def test_twelve_prompts_at_once_give_the_text_of_transformers(tmp_path: Path) -> None:
    path = resolve(MODEL)
    # Least attained service first: a request that has not run yet preempts one that runs.
    flags = ["--workers", "2", "--slots", "2", "--policy", "las"]
    async with running_stack(path, tmp_path, *flags) as stack, AsyncClient(stack.grpc) as client:
        running = [Answer(client, *prompt) for prompt in LONG]
        await asyncio.gather(*(answer.first.wait() for answer in running))
        assert not any(answer.task.done() for answer in running)
        every = running + [Answer(client, *prompt) for prompt in SHORT]
        answers = await asyncio.gather(*(answer.task for answer in every))
    assert sum(answer.preemptions for answer in answers) > 0
    assert sum(answer.spec_decode.num_accepted_tokens for answer in answers) > 0
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        AutoTokenizer.from_pretrained(path),
    )
    for (prompt, max_tokens), answered in zip(LONG + SHORT, answers, strict=True):
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True).input_ids
        assert answered.usage.prompt_tokens == len(ids)
        assert not greedy_differences(model, ids, answered.token_ids), prompt
        assert len(answered.token_ids) == max_tokens or answered.token_ids[-1] == tokenizer.eos_token_id
        assert answered.text == tokenizer.decode(answered.token_ids, skip_special_tokens=True)


class Answer:
    """A request on its way. `first` is set when its first token is here."""

    def __init__(self, client: AsyncClient, prompt: str, max_tokens: int) -> None:
        self.first = asyncio.Event()
        self.task = asyncio.create_task(self._collect(client, prompt, max_tokens))

    async def _collect(self, client: AsyncClient, prompt: str, max_tokens: int) -> Completion:
        collector = Collector()
        messages = [{"role": "user", "content": prompt}]
        async for chunk in client.generate(messages=messages, max_tokens=max_tokens, temperature=0):
            collector.add(chunk)
            self.first.set()
        return collector.completion()
