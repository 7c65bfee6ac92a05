"""Whatever comes over HTTP is answered, never with a 500 and always in OpenAI's shape: by schemathesis from the OpenAPI
document that is served, and by bodies made at random from the table of fields."""

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from gateway.openai.fields import Chat, Completion, Detokenize, Tokenize
from gateway.openai.openapi import document
from gateway.openai.refused import ACCEPTED, REFUSED
from gateway.openai.response_fields import Responses
from laps_sd.gatewaybench.measure import gateway_of_stub
from worker_service.pull import pull

EXAMPLES = int(os.environ.get("EXAMPLES", "50"))  # of schemathesis, for each operation
BODIES = int(os.environ.get("BODIES", "3000"))
KINDS = {
    "/v1/chat/completions": Chat,
    "/v1/completions": Completion,
    "/v1/responses": Responses,
    "/tokenize": Tokenize,
    "/detokenize": Detokenize,
}
OPERATIONS = [found.ok() for found in schemathesis.openapi.from_dict(document()).get_all_operations()]
ODD = (
    None, True, False, 0, 1, -1, 2, 20, 0.5, -0.0, 1e308, 2**31, 2**32, 2**63, -(2**63), 10**30,
    "", "a", "\x00", "ü", "\U0001f469\u200d", "auto", "required", "none", "text", "json_object", "stub",
    [], [[]], [0], [1, "a"], ["a"], [None], {}, {"a": None}, {"": {}}, {"1": 1},
    {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {}}},
    {"regex": "("}, {"grammar": "start: x"}, {"choice": []}, {"json": "{"},
    {"type": "function", "function": {"name": "f"}},
    [{"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}],
    [{"role": "user", "content": "a"}], [{"role": "assistant", "tool_calls": [{}]}],
    [{"role": "tool", "content": [{"type": "text", "text": "a"}]}],
)  # fmt: skip


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A real gateway process before the stub of a scheduler, which answers at once."""
    ready, over = threading.Event(), asyncio.Event()
    found: list[Any] = []

    async def serve() -> None:
        async with gateway_of_stub(200, 64, 500, Path(pull("smollm2-135m"))) as (port, _, _):
            found.extend((f"http://127.0.0.1:{port}", asyncio.get_running_loop()))
            ready.set()
            await over.wait()

    serving = threading.Thread(target=lambda: asyncio.run(serve()))
    serving.start()
    assert ready.wait(60)
    yield found[0]
    found[1].call_soon_threadsafe(over.set)
    serving.join()


def check(status: int, body: Any) -> None:
    """It is an answer, or a refusal as OpenAI's clients read it. 504: `timeout_s` may be anything above 0."""
    assert status < 500 or status == 504, (status, body)
    if status >= 400:
        assert set(body["error"]) == {"message", "type", "param", "code"}, body
        assert len(body["error"]["message"]) <= 1000


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_what_schemathesis_makes_of_the_document(url: str, operation: Any) -> None:
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def ask(case: Any) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = "stub"  # else no more than that would be found wrong
        answer = case.call(base_url=url, timeout=60)
        events = any(kind.startswith("text/event-stream") for kind in answer.headers.get("content-type", ()))
        check(answer.status_code, None if events or not answer.content else answer.json())

    ask()


def test_the_document_is_served(url: str) -> None:
    assert httpx2.get(f"{url}/openapi.json").json() == document()


@pytest.mark.parametrize("path", KINDS)
def test_bodies_made_at_random(url: str, path: str) -> None:
    kind = KINDS[path]
    random = Random(path)
    names = [*(field.alias or name for name, field in kind.model_fields.items()), *REFUSED, *ACCEPTED, "unknown"]
    with httpx2.Client(base_url=url, timeout=60, trust_env=False) as http:
        for number in range(BODIES // len(KINDS)):
            body = _body(random, names)
            answer = http.post(path, content=body)
            events = answer.headers["content-type"].startswith("text/event-stream")
            try:
                check(answer.status_code, None if events else answer.json())
            except AssertionError as error:
                raise AssertionError(f"body {number}: {body[:2000]!r}") from error


def _body(random: Random, names: list[str]) -> bytes:
    """A body that is right but for some fields, and some of its bytes."""
    body: dict[str, Any] = {
        "model": "stub",
        "messages": [{"role": "user", "content": "a"}],
        "prompt": "a",
        "input": "a",
        "tokens": [1],
        "max_tokens": 2,
    }
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        body[random.choice(names)] = random.choice(ODD)
    raw = json.dumps(body).encode()
    if random.random() < 0.2:
        place = random.randrange(len(raw))
        raw = raw[:place] + random.randbytes(random.choice((0, 1, 3))) + raw[place + random.choice((0, 1, 30)) :]
    return raw
