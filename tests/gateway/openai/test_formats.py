"""What an answer must look like: which Structure the scheduler is given. Of tools: test_tools.py."""

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
CLOSED = SCHEMA | {"additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


def body(**fields: Any) -> Chat:
    return parse(Chat, json.dumps(CHAT | fields).encode())


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Structure(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            Structure(json_schema=json.dumps(CLOSED)),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, Structure(json_schema=json.dumps(CLOSED))),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Structure(json_schema=json.dumps(CLOSED))),
        ({"structured_outputs": {"regex": "a+"}}, Structure(regex="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Structure(choice=Choice(texts=["a", "b"]))),
        ({"structured_outputs": {"grammar": "start: /a/"}}, Structure(lark="start: /a/")),
        ({"tools": [WEATHER], "tool_choice": "none"}, None),
        ({"tools": [], "tool_choice": "auto"}, None),
    ],
)
def test_every_way_to_ask_becomes_a_structure(fields: dict[str, Any], wanted: Structure | None) -> None:
    assert formats.structure(body(**fields))[0] == wanted


def test_two_ways_at_once_are_refused() -> None:
    with pytest.raises(BadInput, match=r"^structured_outputs: not together with response_format"):
        formats.structure(body(structured_outputs={"regex": "a"}, response_format={"type": "json_object"}))
