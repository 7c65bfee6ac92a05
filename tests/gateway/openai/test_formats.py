"""What an answer must look like: which Structure the scheduler is given, and how the call of a function is told."""

import json
from typing import Any

import pytest

from gateway.openai import formats
from gateway.openai.fields import Chat
from gateway.openai.parse import parse
from protos.errors import BadInput
from protos.v1.types_pb2 import Choice, Structure
from tests.gateway.openai.harness import CHAT

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
ADD = {"type": "function", "function": {"name": "add"}}


def body(**fields: Any) -> Chat:
    return parse(Chat, json.dumps(CHAT | fields).encode())


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Structure(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            Structure(json_schema=json.dumps(SCHEMA)),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, Structure(json_schema=json.dumps(SCHEMA))),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Structure(json_schema=json.dumps(SCHEMA))),
        ({"structured_outputs": {"regex": "a+"}}, Structure(regex="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Structure(choice=Choice(texts=["a", "b"]))),
        ({"structured_outputs": {"grammar": "start: /a/"}}, Structure(lark="start: /a/")),
        ({"tools": [WEATHER], "tool_choice": "none"}, None),
        ({"tools": [WEATHER], "tool_choice": "required"}, Structure(json_schema=json.dumps(SCHEMA))),
    ],
)
def test_every_way_to_ask_becomes_a_structure(fields: dict[str, Any], wanted: Structure | None) -> None:
    assert formats.structure(body(**fields))[0] == wanted


def test_two_ways_at_once_are_refused() -> None:
    with pytest.raises(BadInput, match=r"^tool_choice: not together with response_format"):
        formats.structure(
            body(tools=[WEATHER], tool_choice="required", response_format={"type": "json_object"}),
        )


def test_of_several_functions_the_grammar_takes_a_name_and_its_arguments() -> None:
    llguidance = pytest.importorskip("llguidance")
    structure, _ = formats.structure(body(tools=[WEATHER, ADD], tool_choice="required"))
    assert structure is not None
    assert llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_lark(structure.lark)) == ""
    assert '"weather" arguments0' in structure.lark


def test_a_named_function_must_be_there() -> None:
    choice = {"type": "function", "function": {"name": "nobody"}}
    with pytest.raises(BadInput, match=r"^tool_choice: names a function that is not in tools"):
        formats.structure(body(tools=[WEATHER], tool_choice=choice))


@pytest.mark.parametrize("kind", ["string", "array", ["object", "null"]])
def test_parameters_of_a_function_are_an_object(kind: Any) -> None:
    function = {"name": "f", "parameters": {"type": kind}}
    with pytest.raises(BadInput, match=r"^tools: parameters of f must be a schema of the type object"):
        formats.structure(body(tools=[{"type": "function", "function": function}], tool_choice="required"))
