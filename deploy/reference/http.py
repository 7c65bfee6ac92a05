"""Tables of the HTTP API, from the OpenAPI document that the gateway serves and from the fields that it refuses."""

from collections.abc import Mapping
from typing import Any

from deploy.reference.tables import code, default_of, table
from gateway.http import errors
from gateway.openai import fields, openapi
from gateway.openai import refused as tables


def paths() -> str:
    return table(
        ("path", "what"),
        (
            (code(f"{verb.upper()} {path}"), operation["summary"])
            for path, verbs in openapi.document()["paths"].items()
            for verb, operation in verbs.items()
        ),
    )


def generating() -> str:
    """Fields of the two calls that generate, and which of them has a field if not both do; our own fields last."""
    chat, completion = _fields("Chat"), _fields("Completion")
    return table(
        ("field", "of", "value", "default", "meaning"),
        (
            (code(name), of, *_field(found))
            for name in sorted(chat | completion, key=lambda name: name in _ours())
            for of, found in (
                [("", chat[name])]
                if chat.get(name) == completion.get(name)
                else [(of, call[name]) for of, call in (("chats", chat), ("completions", completion)) if name in call]
            )
        ),
    )


def responses() -> str:
    """Of the Responses API, without our own fields, which are as above."""
    told = {name: field for name, field in _fields("Responses").items() if name not in _ours()}
    return table(
        ("field", "value", "default", "meaning"), ((code(name), *_field(field)) for name, field in told.items())
    )


def _ours() -> set[str]:
    return {field.alias or name for name, field in fields.Own.model_fields.items()}


def _fields(body: str) -> dict[str, dict[str, Any]]:
    """Of a body, by name: the schema of each, and whether it is required."""
    schema = openapi.document()["components"]["schemas"][body]
    return {name: {**field, "required": name in schema["required"]} for name, field in schema["properties"].items()}


def _field(field: Mapping[str, Any]) -> tuple[str, str, str]:
    default = "required" if field["required"] else default_of(field.get("default"))
    return _kind(field), default, field.get("description", "")


def _kind(field: Mapping[str, Any]) -> str:
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_kind(each) for each in field["anyOf"] if each.get("type") != "null"))
    if "enum" in field or "const" in field:
        return ", ".join(code(str(each)) for each in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return f"[{_kind(field.get('items', {}))}]"
    least, most = field.get("minimum"), field.get("maximum")
    bounded = least is not None and most is not None and most < fields.UINT32
    return field.get("type", "any") + (f", {least} to {most}" if bounded else "")


def refused() -> str:
    return ", ".join(map(code, tables.REFUSED)) + "\n"


def accepted() -> str:
    anywhere, further = (", ".join(map(code, sorted(names))) for names in (tables.ACCEPTED, tables.ACCEPTED_RESPONSES))
    return f"{anywhere}; by `/v1/responses` also {further}\n"


def statuses() -> str:
    rows: dict[int, list[str]] = {}
    for status, name in [*((how.status, how.code) for how in errors.TABLE.values()), *errors.CODES.items()]:
        rows.setdefault(status, []).append(code(name))
    return table(
        ("status", "code", "meaning"),
        ((str(status), ", ".join(codes), openapi.ERRORS[str(status)]) for status, codes in sorted(rows.items())),
    )
