"""The whole service with workers whose engine is vLLM, on the real model in float32: the texts are those of vLLM
undisturbed, whatever is paused, and whoever dies. It runs in our environment, beside that of vLLM."""

import asyncio
import json
import os
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

if "LAPS_SD_TESTS_VLLM_PYTHON" not in os.environ:
    pytest.skip("no interpreter with vLLM is named: make test-vllm", allow_module_level=True)

import httpx2
import pytest_asyncio
from tokenizers import Tokenizer

from laps_sd.client import AsyncClient, BadInput, Collector, Completion
from tests.e2e.stack import Stack, running_stack
from tests.waiting import until
from worker_service.pull import resolve
from worker_service.vllm_engine.promises import LOGIT_BIAS, STRUCTURE

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(7200)]

PYTHON = Path(os.environ["LAPS_SD_TESTS_VLLM_PYTHON"])
MODEL = resolve("smollm2-135m")
MODULE = "worker_service.vllm_engine"
END = 2  # <|im_end|>
ARGS = json.dumps({"enforce_eager": True, "max_model_len": 1024})
PROMPTS = [
    ("Explain photosynthesis to a child.", 28),
    ("Write a Python function that reverses a string.", 28),
    ("A train travels 60 km in 45 minutes. What is its speed in km/h?", 28),
    ("def fibonacci(n):", 28),
    ("What is the capital of France?", 12),
    ("List the days of the week.", 16),
    ("Repeat five times: the queue is short.", 16),
    ("Translate 'good morning' into Spanish.", 8),
    ("Who wrote Romeo and Juliet?", 12),
    ("Count from 1 to 20, separated by commas.", 16),
    ("Write a haiku about rivers.", 12),
    ("If x + 3 = 10, what is x?", 16),
]


def encoded(prompt: str) -> list[int]:
    text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    return list(Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(text, add_special_tokens=False).ids)


@cache
def _of_stock_vllm() -> list[list[int]]:
    asked = [[encoded(prompt), most, [END]] for prompt, most in PROMPTS]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [str(PYTHON), "-m", "tests.vllm.undisturbed"]
    done = subprocess.run(
        command, input=json.dumps(asked), stdout=subprocess.PIPE, env=environment, text=True, check=True
    )
    texts: list[list[int]] = json.loads(done.stdout)
    return texts


@pytest.fixture(scope="module")
def undisturbed() -> list[list[int]]:
    """The answers of stock vLLM to PROMPTS."""
    return _of_stock_vllm()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(undisturbed: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    # Least attained service first: a request that has not run yet preempts one that runs.
    flags = ["--engine", "vllm", "--vllm-python", str(PYTHON), "--vllm-args", ARGS, "--kv-tokens", "4096"]
    flags += ["--workers", "2", "--slots", "2", "--policy", "las"]
    folder = tmp_path_factory.mktemp("stack")
    async with running_stack(MODEL, folder, *flags, device=None, ready_s=3000) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(stack: Stack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(stack.grpc) as made:
        yield made


class Answer:
    """A request on its way. `first` is set when its first token is here."""

    def __init__(self, client: AsyncClient, prompt: str, max_tokens: int, request_id: str | None = None) -> None:
        self.first = asyncio.Event()
        self.task = asyncio.create_task(self._collect(client, prompt, max_tokens, request_id))

    async def _collect(self, client: AsyncClient, prompt: str, max_tokens: int, request_id: str | None) -> Completion:
        collector = Collector()
        asked: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0, "request_id": request_id}
        async for chunk in client.generate(tokens=encoded(prompt), **asked):
            collector.add(chunk)
            self.first.set()
        return collector.completion()


async def test_twelve_prompts_at_once_give_the_texts_of_vllm_undisturbed(
    client: AsyncClient, undisturbed: list[list[int]], did: Counter[str]
) -> None:
    early = [Answer(client, *prompt) for prompt in PROMPTS[:4]]
    await asyncio.gather(*(answer.first.wait() for answer in early))
    answers = await asyncio.gather(*(each.task for each in early + [Answer(client, *prompt) for prompt in PROMPTS[4:]]))
    assert [answer.token_ids for answer in answers] == undisturbed
    pauses = sum(answer.preemptions for answer in answers)
    accepted = sum(answer.spec_decode.num_accepted_tokens for answer in answers)
    did.update({"preemptions in the service": pauses, "drafts accepted in the service": accepted})
    assert pauses > 0
    assert accepted > 0


async def test_a_stop_string_ends_the_text_before_it(client: AsyncClient, undisturbed: list[list[int]]) -> None:
    text = Tokenizer.from_file(str(MODEL / "tokenizer.json")).decode(undisturbed[0])
    word = text[len(text) // 2 :][:6]  # it may begin and end within tokens
    answer = await client.complete(tokens=encoded(PROMPTS[0][0]), max_tokens=28, temperature=0, stop=[word])
    assert (answer.text, answer.finish_reason) == (text.partition(word)[0], "stop")
    assert len(answer.token_ids) < len(undisturbed[0])


async def test_no_text_ends_before_its_least_tokens(client: AsyncClient, undisturbed: list[list[int]]) -> None:
    prompt, shortest = next((PROMPTS[i][0], each) for i, each in enumerate(undisturbed) if each[-1] == END)
    answer = await client.complete(tokens=encoded(prompt), max_tokens=60, min_tokens=len(shortest) + 4, temperature=0)
    assert answer.token_ids[: len(shortest) - 1] == shortest[:-1]
    assert len(answer.token_ids) >= len(shortest) + 4


async def test_log_probabilities_are_those_of_the_tokens(client: AsyncClient) -> None:
    answer = await client.complete(tokens=encoded(PROMPTS[4][0]), max_tokens=12, temperature=0, logprobs=2)
    assert len(answer.logprobs) == len(answer.token_ids)
    for token, told in zip(answer.token_ids, answer.logprobs, strict=True):
        assert told.logprob <= 0
        assert [told.top[0][0], told.top[0][1]] == [token, pytest.approx(told.logprob, abs=1e-5)]  # greedy
        assert len(told.top) == 2


async def test_a_top_k_alone_is_served_where_nothing_is_drafted(client: AsyncClient) -> None:
    """vLLM's own sampler for a CPU takes the largest of no numbers there, and its engine ends."""
    answer = await client.complete(PROMPTS[4][0], max_tokens=12, temperature=1.0, top_k=1, seed=1)
    assert len(answer.token_ids) == 12 or answer.finish_reason == "stop"


async def test_a_cancelled_request_gives_all_back(client: AsyncClient) -> None:
    answer = Answer(client, PROMPTS[1][0], 400, "to-cancel")
    await answer.first.wait()
    await client.cancel("to-cancel")
    assert (await answer.task).finish_reason == "cancelled"

    async def given_back() -> bool:
        stats = await client.stats()
        return stats.running == 0 and all(each.free_blocks == each.blocks for each in stats.workers)

    await client.complete(tokens=[1], max_tokens=1)  # a report tells what is free
    await until(given_back)


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [({"logit_bias": {5: 1.0}}, f"logit_bias: {LOGIT_BIAS}"), ({"regex": "a+"}, f"structure: {STRUCTURE}")],
)
async def test_what_vllm_cannot_do_is_refused_with_the_name_of_the_field(
    client: AsyncClient, asked: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(BadInput) as error:
        await client.complete("a", max_tokens=4, **asked)
    assert error.value.message == refusal


async def test_http_refuses_too_and_tells_what_is_not_promised(stack: Stack) -> None:
    async with httpx2.AsyncClient(base_url=f"http://{stack.http}", timeout=60) as http:
        (card,) = (await http.get("/v1/models")).json()["data"]
        assert set(card["refused_fields"]) == {"logit_bias", "structure", "embedding", "prompt_logprobs"}
        assert any("seed" in each for each in card["caveats"])
        body = {"model": card["id"], "prompt": "a", "response_format": {"type": "json_object"}}
        answer = await http.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")


async def test_a_worker_killed_in_the_middle_changes_no_token(
    stack: Stack, client: AsyncClient, undisturbed: list[list[int]]
) -> None:
    answers = [Answer(client, *prompt, request_id=f"again-{i}") for i, prompt in enumerate(PROMPTS)]
    await answers[0].first.wait()
    await answers[2].first.wait()
    status = await client.status("again-2")
    assert not status.finish_reason
    stack.child(MODULE, having=status.worker_id).kill()
    told = await asyncio.gather(*(answer.task for answer in answers))
    assert [answer.token_ids for answer in told] == undisturbed
