"""Structured output on the real model, through the whole stack, with speculation on."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from jsonschema import validate

from protos.v1 import inference_pb2, inference_pb2_grpc
from protos.v1.types_pb2 import FINISH_REASON_STOP, Structure
from tests.e2e.stack import Stack, running_stack
from worker_service.pull import resolve

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

SCHEMA = {
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
CITIES = {"type": "array", "items": SCHEMA, "minItems": 9, "maxItems": 9}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with running_stack(resolve("smollm2-135m"), tmp_path_factory.mktemp("stack"), "--workers", "2") as running:
        yield running


async def ask(
    stack: Stack, place: str, schema: Any, started: asyncio.Event | None = None, **more: Any
) -> tuple[str, inference_pb2.Final]:
    """The whole answer, and how it ended. `started` is set when there are some tokens."""
    message = inference_pb2.ChatMessage(role="user", content=f"Describe {place} as JSON.")
    request = inference_pb2.GenerateRequest(
        chat=inference_pb2.Chat(messages=[message]), structure=Structure(json_schema=json.dumps(schema)), **more
    )
    text = ""
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        async for chunk in inference_pb2_grpc.InferenceStub(channel).Generate(request):
            text += chunk.text
            if chunk.offset > 20 and started is not None:
                started.set()
    return text, chunk.final


async def test_answers_are_json_of_their_schema_though_tokens_are_drafted(stack: Stack) -> None:
    asked = [(place, temperature) for place in ("Paris", "Lima", "Oslo") for temperature in (0.0, 1.0)]
    answers = await asyncio.gather(
        *(ask(stack, place, SCHEMA, temperature=temperature, max_tokens=120, seed=1) for place, temperature in asked)
    )
    for text, final in answers:
        validate(json.loads(text), SCHEMA)
        assert final.finish_reason == FINISH_REASON_STOP
    drafts = [final.spec_decode for _, final in answers]
    # What the schema forces alone is more.
    assert sum(each.num_accepted_tokens for each in drafts) > sum(each.num_draft_tokens for each in drafts) / 3 > 10


async def test_a_worker_killed_in_the_middle_of_a_structured_answer_changes_no_token(stack: Stack) -> None:
    drawn = {"temperature": 1.0, "seed": 4, "max_tokens": 600}
    whole, _ = await ask(stack, "nine cities", CITIES, **drawn)
    validate(json.loads(whole), CITIES)
    started = asyncio.Event()
    again = asyncio.create_task(ask(stack, "nine cities", CITIES, started, **drawn, request_id="again"))
    await started.wait()
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        asked = inference_pb2.GetRequestRequest(request_id="again")
        status = (await inference_pb2_grpc.InferenceStub(channel).GetRequest(asked)).request
    stack.child("worker_service", having=status.worker_id).kill()
    assert (await again)[0] == whole
