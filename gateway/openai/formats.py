"""The form of an answer: response_format, structured_outputs and tools to the one Structure of a request.
Whether a grammar can be used is found out where it is compiled."""

import json
from typing import Any

from gateway.http.errors import Unsupported
from gateway.openai import schemas, tools
from gateway.openai.fields import Function, Generation, ResponseFormat, StructuredOutputs
from gateway.structure import Check
from protos.errors import BadInput
from protos.v1.types_pb2 import Choice, Structure

MOST_REFUSED = 4  # schemas of one request's functions that are tried: each may take seconds of the only compiler


def structure(body: Generation, may: tools.MayCall = tools.NOTHING) -> tuple[Structure | None, str]:
    """The form that the answer must have, and the field that says so. `may`: what it may call. Raises BadInput."""
    asked = {
        "response_format": _of_format(body.response_format) if body.response_format else None,
        "structured_outputs": _of_outputs(body.structured_outputs) if body.structured_outputs else None,
    }
    given = {field: value for field, value in asked.items() if value is not None}
    if len(given) > 1:
        raise BadInput("structured_outputs", "not together with response_format")
    field, form = next(iter(given.items()), ("", None))
    return (tools.structure(may, form), "tools") if may.functions else (form, field)


async def loosened(body: Generation, may: tools.MayCall, check: Check) -> Structure:
    """As `structure`, but a function that is not `strict` takes any object if its schema alone is refused, or if
    MOST_REFUSED others were. The model is told of that schema all the same. Raises what `check` raises but
    BadInput."""
    functions, refused = [], 0
    for function in may.functions:
        if not function.strict and (refused >= MOST_REFUSED or not await _passes(check, function)):
            function, refused = function.model_copy(update={"parameters": {}}), refused + 1
        functions.append(function)
    made, _ = structure(body, may._replace(functions=tuple(functions)))
    assert made is not None
    return made


async def _passes(check: Check, function: Function) -> bool:
    try:
        await check(tools.arguments(function))
    except BadInput:
        return False
    return True


def _of_format(given: ResponseFormat) -> Structure | None:
    match given.type:
        case "text":
            return None
        case "json_object":
            return Structure(json_object=True)
        case "json_schema":
            if given.json_schema is None or given.json_schema.schema_ is None:
                raise BadInput("response_format", "json_schema.schema: missing")
            as_far_as_can_be = given.json_schema.strict is False
            read = schemas.lenient if as_far_as_can_be else schemas.strict
            return Structure(json_schema=json.dumps(read(given.json_schema.schema_)))
    raise Unsupported("response_format", "type must be text, json_object or json_schema")


def _of_outputs(given: StructuredOutputs) -> Structure:
    field = "structured_outputs"
    if given.model_extra:
        raise Unsupported(field, "must be json, json_object, regex, choice or grammar")
    kinds: dict[str, Any] = {
        "json_schema": _schema(given.json_),
        "json_object": given.json_object or None,
        "regex": given.regex,
        "choice": None if given.choice is None else Choice(texts=given.choice),
        "lark": given.grammar,
    }
    chosen = {kind: value for kind, value in kinds.items() if value is not None}
    if len(chosen) != 1:
        raise BadInput(field, "must have exactly one of json, json_object, regex, choice and grammar")
    return Structure(**chosen)


def _schema(given: dict[str, Any] | str | None) -> str | None:
    """The schema as JSON. A text that is no JSON object is returned as it is: the compiler refuses it."""
    if isinstance(given, dict):
        return json.dumps(schemas.strict(given))
    try:
        schema = json.loads(given or "")
        return json.dumps(schemas.strict(schema)) if isinstance(schema, dict) else given
    except (ValueError, RecursionError):
        return given
