"""Which parts of a JSON schema the grammars' compiler is asked for, and that it takes what is left."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from gateway.openai import formats, schemas
from gateway.structure import MAX_BYTES
from tests.gateway.openai.test_formats import body

PHONE = {"type": "string", "format": "e164", "pattern": "^\\+[1-9]\\d{6,14}$"}  # as zod writes it
AHEAD = {"type": "string", "pattern": "^P(?!$)\\d+D$"}


def taken(schema: dict[str, Any]) -> bool:
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))


@pytest.mark.parametrize("read", [schemas.strict, schemas.lenient])
def test_of_a_format_and_a_pattern_the_one_that_is_known_is_held_to(read: Any) -> None:
    assert read(PHONE)["pattern"] == PHONE["pattern"]
    assert taken(read(PHONE))
    duration = AHEAD | {"format": "duration"}
    assert read(duration)["format"] == "duration"
    assert taken(read(duration))


@pytest.mark.parametrize("unknown", [AHEAD, {"type": "string", "format": "cuid"}], ids=["pattern", "format"])
def test_what_no_grammar_can_hold_to_is_left_out_where_the_schema_is_not_strict(unknown: dict[str, str]) -> None:
    assert taken(schemas.lenient(unknown))
    assert not taken(schemas.strict(unknown))


MODEL = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def test_an_object_has_the_members_that_are_named_and_no_others() -> None:
    schema = {"$defs": {"one": MODEL}, "properties": {"one": {"$ref": "#/$defs/one"}, "title": MODEL}}
    read = schemas.strict(schema)
    inside = (read, read["$defs"]["one"], read["properties"]["title"])
    assert [each["additionalProperties"] for each in inside] == [False] * 3
    assert "additionalProperties" not in read["properties"]


@pytest.mark.parametrize(
    "schema",
    [
        MODEL | {"additionalProperties": True},
        {"type": "object"},
        {"allOf": [MODEL, {"properties": {"age": {"type": "integer"}}}]},
        MODEL | {"anyOf": [{"properties": {"age": {"type": "integer"}}}]},
        MODEL | {"not": {"required": ["age"]}},
        MODEL | {"required": ["age"]},
        {"$ref": "#/$defs/one", "anyOf": [MODEL], "$defs": {"one": {"properties": {"age": {}}}}},
        MODEL | {"description": "a" * MAX_BYTES},
        {"type": "string", "format": [], "pattern": "(?=a)"},
        {"type": "object", "properties": {}},
        MODEL | {"required": [{}]},
        {"anyOf": [MODEL], "required": ["age"]},
    ],
    ids=",".join,
)
def test_an_object_stays_open_where_something_else_may_name_members(schema: dict[str, Any]) -> None:
    assert schemas.strict(schema) == schema


@pytest.mark.parametrize("pattern", ["^(?<year>\\d+)$", "^\\\\1$"], ids=["a named group", "a backslash and a digit"])
def test_what_only_looks_like_a_look_around_is_kept(pattern: str) -> None:
    schema = {"type": "string", "format": "date", "pattern": pattern}
    assert schemas.strict(schema) == schema


def test_properties_may_have_the_names_of_keywords() -> None:
    schema = {"type": "object", "properties": {"format": {"type": "string"}, "pattern": PHONE}}
    assert schemas.strict(schema)["properties"].keys() == {"format", "pattern"}


@pytest.mark.parametrize(("strict", "held"), [(True, False), (None, False), (False, True)])
def test_a_response_format_is_taken_as_far_as_can_be_if_it_says_that_it_is_not_strict(
    strict: bool | None, held: bool
) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": AHEAD, "strict": strict}}
    made, _ = formats.structure(body(response_format=asked))
    assert made is not None
    assert taken(json.loads(made.json_schema)) is held
