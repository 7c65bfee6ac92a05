"""Answers that call a function: whole, and streamed with the name first and the arguments as they grow."""

from types import SimpleNamespace
from typing import Any

import pytest

from gateway.chunk import Chunk
from gateway.openai.choice import Call, Choice
from protos.v1 import types_pb2
from protos.v1.inference_pb2 import Final

TEXT = 'weather{"city":"Rome"}'
CALL = {"name": "weather", "arguments": '{"city":"Rome"}'}


def choice(*functions: str) -> Choice:
    return Choice(0, "r", chat=True, of=SimpleNamespace(), functions=functions)  # type: ignore[arg-type]


def chunks(text: str, reason: int = types_pb2.FINISH_REASON_STOP) -> list[Chunk]:
    """A character each, then the end."""
    said = [Chunk(text=character, token_ids=[i]) for i, character in enumerate(text)]
    return [*said, Chunk(final=Final(finish_reason=reason))]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("functions", "text"), [(("weather", "add"), TEXT), (("weather",), TEXT.removeprefix("weather"))]
)
def test_a_call_is_told_whole(functions: tuple[str, ...], text: str) -> None:
    one = choice(*functions)
    for chunk in chunks(text):
        one.take(chunk)
    said = one.whole()
    assert said["finish_reason"] == "tool_calls"
    call = {"id": "call_r", "type": "function", "function": CALL}
    assert said["message"] == {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}


def test_a_call_is_streamed_with_its_name_once() -> None:
    one = choice("weather", "add")
    deltas = [entry["delta"] for chunk in chunks(TEXT) for entry in one.events(chunk)]
    calls: list[Any] = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert {call["index"] for call in calls} == {0}
    assert [call["function"].get("name") for call in calls] == ["weather"] + [None] * (len(calls) - 1)
    assert [call.get("id") for call in calls] == ["call_r"] + [None] * (len(calls) - 1)
    assert "".join(call["function"]["arguments"] for call in calls) == CALL["arguments"]
    assert deltas[0]["role"] == "assistant"


def test_a_call_that_is_cut_short_says_so() -> None:
    one = choice("weather")
    for chunk in chunks('{"ci', types_pb2.FINISH_REASON_LENGTH):
        one.take(chunk)
    said = one.whole()
    assert said["finish_reason"] == "length"
    assert said["message"]["tool_calls"][0]["function"]["arguments"] == '{"ci'


def test_the_name_ends_where_the_arguments_begin() -> None:
    call = Call(("a", "ab"))
    assert [call.push(text) for text in ("a", "b", "{", "}")] == ["", "", "{", "}"]
    assert (call.name, call.arguments) == ("ab", "{}")
