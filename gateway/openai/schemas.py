"""JSON schemas as the grammars' compiler takes them, with what it cannot hold to left out where that may be. What a
schema is for is not known here. Pure."""

import re
from collections.abc import Iterator
from typing import Any

_LOOKS_AROUND = re.compile(r"\(\?[=!<]|\\[1-9bB]")  # in a pattern: no grammar can
_FORMATS = {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}  # known ones
_LENIENT = {"whitespace_flexible": False, "lenient": True, "coerce_one_of": True}
_BY_NAME = {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}  # of any names
_PLAIN_VALUES = {"const", "default", "enum", "examples"}  # no schemas in there
_NAMES_ALL = {
    *("$defs", "$id", "$schema", "default", "definitions", "description", "examples", "properties", "required"),
    *("title", "type", "x-guidance"),
}
_MIXES = {"dependentSchemas", "if", "not", "unevaluatedProperties"}  # another schema says more of the same object
_JOINS = {"$ref", "allOf", "anyOf", "oneOf"}  # so do these beside `properties`


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """An object has no other members than those that are named, unless the schema says otherwise: models invent some,
    and readers fail of them. Where a string has a `format` and a `pattern`, one of them may be unknown to the compiler:
    the other says it, too (zod writes both)."""
    return dict(_read(schema, lenient=False, close=not any(map(_is_mixed, _schemas(schema)))))


def lenient(schema: dict[str, Any]) -> dict[str, Any]:
    """As `strict`, but whatever cannot be held to is left out. As OpenAI does where a schema is not `strict`."""
    own = schema.get("x-guidance")
    read = dict(_read(schema, lenient=True, close=not any(map(_is_mixed, _schemas(schema)))))
    return read | {"x-guidance": _LENIENT | (own if isinstance(own, dict) else {})}


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """It, and all that are in it."""
    if isinstance(schema, list):
        for each in schema:
            yield from _schemas(each)
    elif isinstance(schema, dict):
        yield schema
        for name, value in schema.items():
            if name in _BY_NAME and isinstance(value, dict):
                yield from _schemas(list(value.values()))
            elif name not in _PLAIN_VALUES:
                yield from _schemas(value)


def _is_mixed(schema: dict[str, Any]) -> bool:
    """Whether several schemas say which members an object has: none of them may be the last word then."""
    joined = schema.get("allOf")
    several = isinstance(joined, list) and len(joined) > 1
    return several or not _MIXES.isdisjoint(schema) or ("properties" in schema and not _JOINS.isdisjoint(schema))


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
    if close and "properties" in made and made.keys() <= _NAMES_ALL:
        made["additionalProperties"] = False
    return made


def _left_out(format: Any, pattern: Any, lenient: bool) -> str | None:
    """Which of the two, if any."""
    if not isinstance(pattern, str):
        return None
    if _LOOKS_AROUND.search(pattern):
        return "pattern" if lenient or format in _FORMATS else None
    return "format" if isinstance(format, str) and format not in _FORMATS else None
