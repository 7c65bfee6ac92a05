"""The Responses API without state: the unmodified `openai` package reads its objects and its events."""

import asyncio
import json
from typing import Any

import pytest

from protos.v1 import types_pb2
from tests.gateway.harness import WAIT_S, ending, ids
from tests.gateway.openai.harness import CHAT, door
from tests.gateway.openai.test_client import answer, asking

ASK: Any = {"model": "tiny", "input": "the fox"}


async def test_a_plain_answer() -> None:
    async with asking() as (at, client):
        said = await answer(at, client.responses.create(**ASK), "jumps")
        assert (said.output_text, said.status, said.usage.output_tokens) == ("jumps", "completed", len(ids("jumps")))


async def test_a_stream_has_every_event_in_order() -> None:
    async with asking() as (at, client):

        async def read() -> list[Any]:
            return [event async for event in await client.responses.create(**ASK, stream=True)]

        said = await answer(at, read(), "jumps")
        kinds = [event.type.removeprefix("response.") for event in said]
        begin = ["created", "in_progress", "output_item.added", "content_part.added"]
        end = ["output_text.done", "content_part.done", "output_item.done", "completed"]
        assert kinds == begin + ["output_text.delta"] * (len(kinds) - 8) + end
        assert [event.sequence_number for event in said] == list(range(len(said)))
        assert "".join(event.delta for event in said if event.type == "response.output_text.delta") == "jumps"
        assert said[-1].response.output_text == "jumps"


async def test_an_answer_that_is_cut_short_is_incomplete() -> None:
    async with asking() as (at, client):
        task = asyncio.create_task(client.responses.create(**ASK, max_output_tokens=3))
        submit = await at.link.accept()
        assert submit.limits.max_tokens == 3
        await at.link.delta(submit, 0, [40] * 3, ending=ending(types_pb2.FINISH_REASON_LENGTH))
        said = await asyncio.wait_for(task, WAIT_S)
        assert said.status == "incomplete"
        assert said.incomplete_details is not None
        assert said.incomplete_details.reason == "max_output_tokens"


async def test_the_input_is_that_of_a_chat() -> None:
    async with door() as at:
        _, chat = await at.answered(
            CHAT | {"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]}
        )
        parts = [{"type": "input_text", "text": "h"}, {"type": "input_text", "text": "i"}]
        body = ASK | {"instructions": "be kind", "input": [{"role": "user", "content": parts}]}
        task = at.asked(body, "/v1/responses")
        submit = await at.link.accept()
        await at.say(submit, "a")
        assert list(submit.prompt) == list(chat.prompt)
        assert (await task).status_code == 200


@pytest.mark.parametrize("role", ["system", "developer"])
async def test_instructions_and_the_inputs_own_are_one_message(role: str) -> None:
    async with door() as at:
        body = ASK | {"instructions": "be kind", "input": [{"role": role, "content": "be short"}]}
        task = at.asked(body, "/v1/responses")
        submit = await at.link.accept()
        assert list(submit.prompt) == ids("<bos>system: be kind\n\nbe short\nassistant: ")
        await at.say(submit, "a")
        assert (await task).status_code == 200


async def test_a_late_error_is_an_event() -> None:
    async with asking() as (at, client):

        async def read() -> list[Any]:
            return [event async for event in await client.responses.create(**ASK, stream=True)]

        task = asyncio.create_task(read())
        submit = await at.link.accept()
        await at.link.delta(submit, 0, ids("jumps"))
        end = ending(types_pb2.FINISH_REASON_ERROR, message="it broke")
        await at.link.delta(submit, len(ids("jumps")), ending=end)
        last = (await asyncio.wait_for(task, WAIT_S))[-1]
        assert (last.type, last.code, last.message) == ("error", "internal_error", "it broke")


async def test_an_error_of_a_request_that_waited_is_an_event_for_the_streaming_helper(commented: asyncio.Event) -> None:
    """A comment has begun the answer, of which there is nothing else."""
    async with asking() as (at, client):

        async def read() -> list[Any]:
            async with client.responses.stream(**ASK) as stream:
                return [event async for event in stream]

        task = asyncio.create_task(read())
        submit = await at.link.accept()
        await asyncio.wait_for(commented.wait(), WAIT_S)
        await at.link.delta(submit, 0, ending=ending(types_pb2.FINISH_REASON_DEADLINE))
        said = await asyncio.wait_for(task, WAIT_S)
        assert [event.type for event in said] == ["response.created", "response.in_progress", "error"]
        assert [event.sequence_number for event in said] == [0, 1, 2]
        assert said[-1].code == "deadline_exceeded"


@pytest.mark.parametrize(
    ("field", "value", "param", "code"),
    [
        ("previous_response_id", "a", "previous_response_id", "unsupported_parameter"),
        ("background", True, "background", "unsupported_parameter"),
        ("tools", [{"type": "web_search"}], "tools[0].type", "unsupported_parameter"),
        ("tools", [{"type": "function"}], "tools[0].name", "invalid_value"),
        ("tools", [{"type": "function", "name": "a b"}], "tools[0].name", "invalid_value"),
        ("tools", [{"type": "function", "name": "a", "parameters": []}], "tools[0].parameters", "invalid_value"),
        ("tool_choice", "required", "tool_choice", "invalid_value"),
        ("tool_choice", {"type": "web_search"}, "tool_choice.type", "invalid_value"),
        ("input", [{"type": "function_call", "name": "a"}], "input[0].call_id", "invalid_value"),
        ("input", [{"type": "function_call", "call_id": "a"}], "input[0].name", "invalid_value"),
        ("input", [{"type": "function_call", "call_id": "a", "name": 5}], "input[0].name", "invalid_value"),
        (
            "input",
            [{"type": "function_call_output", "call_id": "a", "output": ""}],
            "input[0].call_id",
            "invalid_value",
        ),
        ("input", [{"type": "reasoning", "summary": []}], "input", "invalid_value"),
        ("input", [{"type": "computer_call_output"}], "input[0].type", "unsupported_parameter"),
        (
            "input",
            [{"role": "user", "content": [{"type": "input_image"}]}],
            "input[0].content",
            "unsupported_parameter",
        ),
        ("input", [], "input", "invalid_value"),
        ("input", [{"role": "nobody", "content": "a"}], "input[0].role", "invalid_value"),
        ("max_output_tokens", 0, "max_output_tokens", "invalid_value"),
        ("max_output_tokens", 1000, "max_output_tokens", "context_length_exceeded"),
        ("text", {"format": {"type": "json_schema"}}, "text.format.schema", "invalid_value"),
        ("text", {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}, "text", "invalid_value"),
        ("text", {"format": {"type": "json_schema", "schema": {"title": "x" * 70_000}}}, "text", "invalid_value"),
        ("temperature", 9, "temperature", "invalid_value"),
        ("include", ["message.output_text.logprobs"], "include", "unsupported_parameter"),
        ("metadata", {"a": 1}, "metadata", "invalid_value"),
        ("metadata", {"a": "x" * 513}, "metadata", "invalid_value"),
        ("metadata", {"a" * 65: "x"}, "metadata", "invalid_value"),
        ("metadata", {str(i): "x" for i in range(17)}, "metadata", "invalid_value"),
        ("parallel_tool_calls", "yes", "parallel_tool_calls", "invalid_value"),
    ],
)
async def test_what_needs_state_or_is_wrong_is_named(field: str, value: object, param: str, code: str) -> None:
    async with door() as at:
        error = await at.refused(ASK | {field: value}, "/v1/responses")
        assert (error["status"], error["param"], error["code"]) == (400, param, code), error


async def test_what_asks_for_nothing_is_taken() -> None:
    async with door() as at:
        body = ASK | {"store": True, "tools": [], "truncation": "auto", "metadata": {}, "user": "me"}
        body |= {"include": ["reasoning.encrypted_content"], "stream_options": {"include_obfuscation": True}}
        body |= {"max_tool_calls": 3, "prompt_cache_retention": "24h"}
        task = at.asked(body, "/v1/responses")
        await at.say(await at.link.accept(), "a")
        assert (await task).json()["store"] is False


async def test_what_has_no_effect_is_told_back() -> None:
    told: Any = {"metadata": {"team": "a"}, "user": "me", "safety_identifier": "s", "prompt_cache_key": "k"}
    told |= {"reasoning": {"effort": "low"}, "truncation": "auto", "parallel_tool_calls": False}
    async with asking() as (at, client):
        verbosity: Any = {"verbosity": "low"}
        said = (await answer(at, client.responses.create(**ASK, **told, text=verbosity), "a")).to_dict()
        assert {name: said[name] for name in told} == told
        assert said["text"] == {"format": {"type": "text"}, "verbosity": "low"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_number_beyond_all_is_told_back_as_none(stream: bool) -> None:
    """JSON has no infinity, and no parser of clients reads one."""
    async with door() as at:
        asked = json.dumps(ASK | {"text": {"verbosity": 5}, "reasoning": {"effort": 5}, "stream": stream})
        task = asyncio.create_task(at.http.post("/v1/responses", content=asked.replace("5", "1e999")))
        await at.say(await at.link.accept(), "a")
        said = (await asyncio.wait_for(task, WAIT_S)).text
        whole = json.loads(said.rsplit("data: ", 1)[1])["response"] if stream else json.loads(said)
        assert "Infinity" not in said
        assert (whole["text"]["verbosity"], whole["reasoning"]["effort"]) == (None, None)
