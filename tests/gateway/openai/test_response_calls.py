"""Functions in the Responses API: told flat, called as an item of the output, whole and streamed, and what came of a
call read back from the input. What a grammar lets through is as for chats (test_tools.py)."""

import asyncio
import json
from typing import Any

import pytest
from openai.types.responses import ResponseFunctionToolCall

from gateway.chunk import Chunk
from gateway.openai import responses
from gateway.openai.fields import Chat
from gateway.openai.parse import parse
from gateway.openai.response import Response
from gateway.openai.response_fields import Responses
from protos.errors import BadInput
from protos.v1.inference_pb2 import GenerateRequest
from tests.gateway.harness import WAIT_S
from tests.gateway.openai import test_tools as chats
from tests.gateway.openai.harness import door
from tests.gateway.openai.test_client import answer, asking

CHATS_TOOLS = [chats.WEATHER, chats.ADD]
TOOLS = [{"type": "function", **tool["function"]} for tool in CHATS_TOOLS]
ASK: Any = {"model": "tiny", "input": "the fox", "tools": TOOLS}
CALLED: dict[str, Any] = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": chats.ARGUMENTS}
RESULT: dict[str, Any] = {"type": "function_call_output", "call_id": "c", "output": "sunny"}
USER = {"role": "user", "content": "the fox"}


def body(**fields: Any) -> Responses:
    return parse(Responses, json.dumps(ASK | fields).encode())


def request_of(**fields: Any) -> GenerateRequest:
    return responses.asked(body(**fields), "r").requests[0]


def chats_request(**fields: Any) -> GenerateRequest:
    made = Chat.model_validate({"model": "tiny", "messages": [USER], "tools": CHATS_TOOLS} | fields)
    return responses.request.of_chat(made, "r").requests[0]


def response(**fields: Any) -> Response:
    asked = body(**fields)
    return Response(asked, "r", 3, responses.asked(asked, "r").may)


def told(text: str, reason: int = chats.STOP, *, cut: int = 1, **fields: Any) -> tuple[list[Any], dict[str, Any]]:
    """The events of a stream, and the same answer whole."""
    one, other = response(**fields), response(**fields)
    for chunk in chats.chunks(text, reason):
        other.take(chunk)
    return [event for chunk in chats.chunks(text, reason, cut=cut) for event in one.events(chunk)], other.whole()


@pytest.mark.parametrize(
    ("choice", "chats_choice"),
    [
        ("auto", "auto"),
        ("required", "required"),
        ("none", "none"),
        ({"type": "function", "name": "weather"}, chats.NAMED),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]},
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]},
            },
        ),
    ],
)
def test_tools_are_those_of_a_chat(choice: Any, chats_choice: Any) -> None:
    assert request_of(tool_choice=choice) == chats_request(tool_choice=chats_choice)


def test_an_allowed_tool_may_be_called_and_no_other() -> None:
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}
    asked = responses.asked(body(tool_choice=allowed), "r")
    assert ([function.name for function in asked.may.functions], asked.may.must) == (["add"], False)
    unknown = allowed | {"tools": [{"type": "function", "name": "nobody"}]}
    with pytest.raises(BadInput, match="tool_choice: names a function that is not in tools"):
        request_of(tool_choice=unknown)


def test_a_conversation_with_calls_is_that_of_a_chat() -> None:
    second = CALLED | {"call_id": "d", "name": "add", "arguments": ""}
    items = [
        USER,
        {"type": "reasoning", "summary": [], "id": "rs_1"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        CALLED,
        second,
        RESULT,
        RESULT | {"call_id": "d", "output": [{"type": "input_text", "text": "warm"}]},
    ]
    calls = [
        {"id": each["call_id"], "type": "function", "function": {"name": each["name"], "arguments": each["arguments"]}}
        for each in (CALLED, second)
    ]
    messages = [
        USER,
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
        {"role": "tool", "tool_call_id": "d", "content": "warm"},
    ]
    assert request_of(input=items) == chats_request(messages=messages)


@pytest.mark.parametrize("cut", [1, 7, 1000])
@pytest.mark.parametrize(
    ("fields", "text", "words"),
    [
        ({}, chats.CALL, ""),
        ({}, f"I look. {chats.CALL}", "I look. "),
        ({"tool_choice": {"type": "function", "name": "weather"}}, chats.ARGUMENTS, ""),
    ],
)
def test_a_call_is_an_item_behind_the_words(fields: dict[str, Any], text: str, words: str, cut: int) -> None:
    events, whole = told(text, cut=cut, **fields)
    *message, call = whole["output"]
    function = {"call_id": "call_r", "name": "weather", "arguments": chats.ARGUMENTS}
    assert call == {"id": "fc_weather.r", "type": "function_call", "status": "completed", **function}
    assert [item["content"][0]["text"] for item in message] == ([words] if words else [])

    kinds = list(dict.fromkeys(event["type"].removeprefix("response.") for event in events))
    begin = ["created", "in_progress", "output_item.added"]
    spoken = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done", "output_item.done"]
    called = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert kinds == begin + (spoken if words else []) + called + ([] if words else ["output_item.done"]) + ["completed"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas = [event for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert "".join(event["delta"] for event in deltas) == chats.ARGUMENTS
    assert {(event["item_id"], event["output_index"]) for event in deltas} == {("fc_weather.r", len(message))}
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == whole["output"]
    assert events[-1]["response"]["output"] == whole["output"]


def test_words_alone_are_a_message_though_there_are_tools() -> None:
    for text in ("a < b", "ends with <tool_", ""):
        events, whole = told(text)
        assert [item["type"] for item in whole["output"]] == ["message"]
        assert whole["output"][0]["content"][0]["text"] == text
        said = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        assert "".join(said) == text


def test_a_call_that_is_cut_short_is_incomplete() -> None:
    events, whole = told(chats.CALL[:-5], chats.LENGTH)
    (call,) = whole["output"]
    assert (whole["status"], call["status"]) == ("incomplete", "incomplete")
    assert chats.ARGUMENTS.startswith(call["arguments"])
    assert events[-1]["type"] == "response.incomplete"


def test_the_answer_says_what_was_asked_of_tools() -> None:
    choice = {"type": "function", "name": "weather"}
    *_, last = response(tool_choice=choice).events(Chunk(final=chats.chunks("")[-1].final))
    assert last["response"]["tool_choice"] == choice
    assert [(tool["type"], tool["name"]) for tool in last["response"]["tools"]] == [
        ("function", "weather"),
        ("function", "add"),
    ]


async def test_the_openai_package_reads_a_call_and_sends_it_back() -> None:
    named = {"type": "function", "name": "weather"}
    async with asking(context_tokens=512) as (at, client):
        first = await answer(at, client.responses.create(**ASK, tool_choice=named), chats.ARGUMENTS)
        (call,) = first.output
        assert isinstance(call, ResponseFunctionToolCall)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        second = ASK | {"input": [USER, *first.output, result], "tool_choice": "none"}
        said = await answer(at, client.responses.create(**second), "jumps")
        assert said.output_text == "jumps"


async def test_a_stream_of_a_call_reads_as_the_openai_package_expects() -> None:
    async with asking(context_tokens=512) as (at, client):

        async def read() -> Any:
            named: Any = {"type": "function", "name": "weather"}
            async with client.responses.stream(**ASK, tool_choice=named) as stream:
                return await stream.get_final_response()

        said = await answer(at, read(), chats.ARGUMENTS)
        assert [(item.type, item.arguments) for item in said.output] == [("function_call", chats.ARGUMENTS)]


async def test_a_grammar_that_cannot_be_used_is_told_of_the_tools() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "nothing"}}}
    tool = {"type": "function", "name": "f", "parameters": parameters, "strict": True}
    async with door(context_tokens=512) as at:
        error = await asyncio.wait_for(at.refused(ASK | {"tools": [tool]}, "/v1/responses"), WAIT_S)
        assert (error["status"], error["param"]) == (400, "tools")
