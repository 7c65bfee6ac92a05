"""The promise on the real model: twelve prompts at once, through the whole stack, greedy, token for token; and answers
that have the structure asked for."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import torch
from jsonschema import validate
from transformers import AutoModelForCausalLM, AutoTokenizer

from laps_sd.client import AsyncClient, Collector, Completion
from tests.e2e.stack import Stack, running_stack
from tests.worker.harness import greedy_differences
from worker_service.pull import resolve

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    # Least attained service first: a request that has not run yet preempts one that runs.
    flags = ["--workers", "2", "--slots", "2", "--policy", "las"]
    async with running_stack(resolve(MODEL), tmp_path_factory.mktemp("stack"), *flags) as running:
        yield running


async def test_twelve_prompts_at_once_give_the_text_of_transformers(stack: Stack) -> None:
    path = resolve(MODEL)
    async with AsyncClient(stack.grpc) as client:
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


CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"type": "string", "maxLength": 20},
        "inhabitants": {"type": "integer", "minimum": 0, "maximum": 40_000_000},
        "capital": {"type": "boolean"},
    },
    "required": ["city", "country", "inhabitants", "capital"],
    "additionalProperties": False,
}
CITIES = {"type": "array", "items": CITY, "minItems": 9, "maxItems": 9}


async def test_answers_have_the_structure_asked_for_though_tokens_are_drafted(stack: Stack) -> None:
    async with AsyncClient(stack.grpc) as client:
        answers = await asyncio.gather(
            *(
                client.complete(f"{place}: ", json_schema=CITY, temperature=temperature, max_tokens=120, seed=1)
                for place in ("Paris", "Lima", "Oslo")
                for temperature in (0.0, 1.0)
            )
        )
    for answered in answers:
        validate(json.loads(answered.text), CITY)
    drafts = [answered.spec_decode for answered in answers]
    # What the schema forces alone is more.
    assert sum(each.num_accepted_tokens for each in drafts) > sum(each.num_draft_tokens for each in drafts) / 3 > 10


async def test_a_worker_killed_in_the_middle_of_a_structured_answer_changes_no_token(stack: Stack) -> None:
    asked: dict[str, Any] = {"json_schema": CITIES, "temperature": 1.0, "seed": 4, "max_tokens": 600}
    async with AsyncClient(stack.grpc) as client:
        whole = await client.complete("Nine cities: ", **asked)
        validate(json.loads(whole.text), CITIES)
        collector = Collector()
        async for chunk in client.generate("Nine cities: ", request_id="again", **asked):
            if chunk.offset <= 20 < chunk.offset + len(chunk.token_ids):
                status = await client.status("again")
                stack.child("worker_service", having=status.worker_id).kill()
            collector.add(chunk)
    assert collector.completion().token_ids == whole.token_ids


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
