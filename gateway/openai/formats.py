"""The form of an answer: response_format, structured_outputs and tools to the one Structure of a request.
Whether a grammar can be used is found out where it is compiled."""

import json
from typing import Any

from gateway.http.errors import Unsupported
from gateway.openai.fields import Chat, Function, Generation, ResponseFormat, StructuredOutputs
from protos.errors import BadInput
from protos.v1.types_pb2 import Choice, Structure

TOOLS_IN_TEMPLATE = "the model's template does not tell it of tools: send `required`, a function's name, or `none`"


def structure(body: Generation) -> tuple[Structure | None, str]:
    """The form that the answer must have, and the field that says so. Raises BadInput."""
    asked = {
        "response_format": _of_format(body.response_format) if body.response_format else None,
        "structured_outputs": _of_outputs(body.structured_outputs) if body.structured_outputs else None,
        "tool_choice": _of_tools(called(body)) if isinstance(body, Chat) else None,
    }
    given = {field: value for field, value in asked.items() if value is not None}
    if len(given) > 1:
        raise BadInput(list(given)[-1], f"not together with {next(iter(given))}")
    return next(((value, field) for field, value in given.items()), (None, ""))


def called(body: Chat) -> list[Function]:
    """The functions of which the answer must call one; none: it is text. Raises BadInput."""
    functions = [tool.function for tool in body.tools]
    choice = body.tool_choice or ("auto" if functions else "none")
    if choice == "none":
        return []
    if not functions:
        raise BadInput("tool_choice", "there are no tools to choose from")
    if len({function.name for function in functions}) < len(functions):
        raise BadInput("tools", "two functions have the same name")
    if choice == "auto":
        raise Unsupported("tool_choice", f"auto is not supported: {TOOLS_IN_TEMPLATE}")
    if choice == "required":
        return functions
    named = [function for function in functions if function.name == choice.function.name]
    if not named:
        raise BadInput("tool_choice", "names a function that is not in tools")
    return named


def _of_format(given: ResponseFormat) -> Structure | None:
    match given.type:
        case "text":
            return None
        case "json_object":
            return Structure(json_object=True)
        case "json_schema":
            if given.json_schema is None or given.json_schema.schema_ is None:
                raise BadInput("response_format", "json_schema.schema: missing")
            return Structure(json_schema=json.dumps(given.json_schema.schema_))
    raise Unsupported("response_format", "type must be text, json_object or json_schema")


def _of_outputs(given: StructuredOutputs) -> Structure:
    field = "structured_outputs"
    if given.model_extra:
        raise Unsupported(field, "must be json, json_object, regex, choice or grammar")
    kinds: dict[str, Any] = {
        "json_schema": given.json_ if isinstance(given.json_, str | None) else json.dumps(given.json_),
        "json_object": given.json_object or None,
        "regex": given.regex,
        "choice": None if given.choice is None else Choice(texts=given.choice),
        "lark": given.grammar,
    }
    chosen = {kind: value for kind, value in kinds.items() if value is not None}
    if len(chosen) != 1:
        raise BadInput(field, "must have exactly one of json, json_object, regex, choice and grammar")
    return Structure(**chosen)


def _of_tools(functions: list[Function]) -> Structure | None:
    """Of one function its arguments. Of several: the name of one and, right behind it, its arguments.
    Raises BadInput."""
    if not functions:
        return None
    if len(functions) == 1:
        return Structure(json_schema=json.dumps(_object(functions[0])))
    rules = [f"call{i}: {json.dumps(function.name)} arguments{i}" for i, function in enumerate(functions)]
    for i, function in enumerate(functions):
        schema = _object(function) | {"x-guidance": {"whitespace_flexible": False}}
        rules.append(f"arguments{i}: %json {json.dumps(schema)}")
    start = "start: " + " | ".join(f"call{i}" for i in range(len(functions)))
    return Structure(lark="\n".join([start, *rules]))


def _object(function: Function) -> dict[str, Any]:
    """The schema of a function's arguments. They are a JSON object: where it begins, the function's name ends. Raises
    BadInput."""
    schema = {"type": "object", **function.parameters}
    if schema["type"] != "object":
        raise BadInput("tools", f"parameters of {function.name} must be a schema of the type object")
    return schema
