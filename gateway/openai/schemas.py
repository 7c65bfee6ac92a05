"""JSON schemas as the grammars' compiler takes them, with what it cannot hold to left out where that may be. What a
schema is for is not known here. Pure."""

import re
from typing import Any

_LOOKS_AROUND = re.compile(r"\(\?[=!<]|\\[1-9bB]")  # in a pattern: no grammar can
_FORMATS = {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}  # known ones
_PLAIN_VALUES = {"const", "default", "enum", "examples"}  # no schemas in there
_LENIENT = {"whitespace_flexible": False, "lenient": True, "coerce_one_of": True}


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """Where a string has a `format` and a `pattern`, one of them may be unknown to the compiler: the other says it, too
    (zod writes both)."""
    return dict(_without(schema, lenient=False))


def lenient(schema: dict[str, Any]) -> dict[str, Any]:
    """Whatever cannot be held to is left out. As OpenAI does where a schema is not `strict`."""
    own = schema.get("x-guidance")
    return dict(_without(schema, lenient=True)) | {"x-guidance": _LENIENT | (own if isinstance(own, dict) else {})}


def _without(schema: Any, *, lenient: bool) -> Any:
    if isinstance(schema, list):
        return [_without(each, lenient=lenient) for each in schema]
    if not isinstance(schema, dict):
        return schema
    left_out = _left_out(schema.get("format"), schema.get("pattern"), lenient)
    return {
        name: value if name in _PLAIN_VALUES else _without(value, lenient=lenient)
        for name, value in schema.items()
        if name != left_out
    }


def _left_out(format: Any, pattern: Any, lenient: bool) -> str | None:
    """Which of the two, if any. What is no text is a property of that name."""
    if not isinstance(pattern, str):
        return None
    if _LOOKS_AROUND.search(pattern):
        return "pattern" if lenient or format in _FORMATS else None
    return "format" if isinstance(format, str) and format not in _FORMATS else None
