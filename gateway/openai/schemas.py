"""JSON schemas as the grammars' compiler takes them, with what it cannot hold to left out where that may be. What a
schema is for is not known here. Pure."""

import json
import re
from collections.abc import Iterator
from typing import Any

from gateway.structure import MAX_BYTES

_LOOKS_AROUND = re.compile(r"\(\?<?[=!]|(?<!\\)(?:\\\\)*\\[1-9bB]")  # in a pattern: no grammar can
_FORMATS = {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}  # known ones
_LENIENT = {"whitespace_flexible": False, "lenient": True, "coerce_one_of": True}
_BY_NAME = {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}  # schemas by names
_PLAIN_VALUES = {"const", "default", "enum", "examples"}  # no schemas in there
_JOINS = {"$ref", "allOf", "anyOf", "oneOf"}
_VALUES = {"const", "enum"}
_SAYS_MEMBERS = {"additionalProperties", "minProperties", "patternProperties", "properties", "required", *_VALUES}
# With one of these another schema says more of the same object.
_MIXES = {
    *("$dynamicRef", "$recursiveRef", "dependencies", "dependentRequired", "dependentSchemas"),
    *("if", "not", "unevaluatedProperties"),
}
KEEPS_OPEN = {"additionalProperties", "minProperties", "patternProperties", "propertyNames", *_JOINS, *_VALUES}


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """An object has no other members than those that are named, unless the schema says otherwise: models invent some,
    and readers fail of them. Where a string has a `format` and a `pattern`, one of them may be unknown to the compiler:
    the other says it, too (zod writes both)."""
    return _whole(schema, lenient=False)


def lenient(schema: dict[str, Any]) -> dict[str, Any]:
    """As `strict`, but whatever cannot be held to is left out. As OpenAI does where a schema is not `strict`."""
    own = schema.get("x-guidance")
    return _whole(schema, lenient=True) | {"x-guidance": _LENIENT | (own if isinstance(own, dict) else {})}


def _whole(schema: dict[str, Any], *, lenient: bool) -> dict[str, Any]:
    if len(json.dumps(schema)) > MAX_BYTES:  # it will be refused: none is looked at for long
        return schema
    read = dict(_read(schema, lenient=lenient, close=not any(map(_is_mixed, _schemas(schema)))))
    fits = len(json.dumps(read)) <= MAX_BYTES
    return read if fits else dict(_read(schema, lenient=lenient, close=False))


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """It, and all that are in it."""
    ahead = [schema]
    while ahead:
        one = ahead.pop()
        if isinstance(one, list):
            ahead += one
        elif isinstance(one, dict):
            yield one
            for name, value in one.items():
                if name in _BY_NAME and isinstance(value, dict):
                    ahead += value.values()
                elif name not in _PLAIN_VALUES:
                    ahead.append(value)


def _is_mixed(schema: dict[str, Any]) -> bool:
    """Whether several schemas say which members an object has: none of them may be the last word then."""
    joins = _JOINS & schema.keys()
    parts = schema.get("allOf")
    several = len(joins) > 1 or (isinstance(parts, list) and len(parts) > 1)
    return several or not _MIXES.isdisjoint(schema) or (bool(joins) and not _SAYS_MEMBERS.isdisjoint(schema))


def _read(schema: Any, *, lenient: bool, close: bool) -> Any:
    if isinstance(schema, list):
        return [_read(each, lenient=lenient, close=close) for each in schema]
    if not isinstance(schema, dict):
        return schema
    left_out = _left_out(schema.get("format"), schema.get("pattern"), lenient)
    made = dict[str, Any]()
    for name, value in schema.items():
        if name in _BY_NAME and isinstance(value, dict):
            made[name] = {key: _read(each, lenient=lenient, close=close) for key, each in value.items()}
        elif name != left_out:
            made[name] = value if name in _PLAIN_VALUES else _read(value, lenient=lenient, close=close)
    if close and _names_all(made):
        made["additionalProperties"] = False
    return made


def _names_all(schema: dict[str, Any]) -> bool:
    """Whether it names members, and each that an object may be meant to have."""
    named, must = schema.get("properties"), schema.get("required", [])
    if not isinstance(named, dict) or not named or not isinstance(must, list):
        return False
    return all(isinstance(name, str) and name in named for name in must) and KEEPS_OPEN.isdisjoint(schema)


def _left_out(format: Any, pattern: Any, lenient: bool) -> str | None:
    """Which of the two, if any."""
    if not isinstance(pattern, str):
        return None
    if _LOOKS_AROUND.search(pattern):
        return "pattern" if lenient or (isinstance(format, str) and format in _FORMATS) else None
    return "format" if isinstance(format, str) and format not in _FORMATS else None
