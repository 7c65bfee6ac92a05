"""Bytes of a body to one of the objects of fields.py. Whatever the bytes are, what is wrong with them is a BadInput
that names the field, and repeats none of what was sent but names of fields that we know. Nothing is served here."""

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, from_json

from gateway.http.errors import Unsupported
from gateway.openai.fields import Body, Chat, Completion
from gateway.openai.refused import ACCEPTED, ACCEPTED_RESPONSES, REFUSED
from gateway.openai.response_fields import Responses
from protos.errors import BadInput

SomeBody = TypeVar("SomeBody", bound=Body)
ANSWERING: tuple[type[Body], ...] = (Chat, Completion, Responses)
BOM = b"\xef\xbb\xbf"  # some programs begin every UTF-8 text with it
# Fields that would change what any endpoint computes.
_EVERYWHERE = (
    "adapter_id", "chat_template", "documents", "lora_name", "lora_path", "lora_request", "truncate_prompt_tokens",
)  # fmt: skip
EVERYWHERE: Mapping[str, tuple[Any, ...]] = {name: REFUSED[name] for name in _EVERYWHERE}
_WHOLE = "nothing is kept here: send the whole conversation"
HINTS = {  # by the field's name, or how it begins; told where the fields that they name are there
    "max_output_tokens": "send `max_completion_tokens`",
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "send `max_output_tokens`"),
    "chat_template": "a template is a program: the model's own is used, with `chat_template_kwargs`",
    "documents": "write them into a message",
    "enable_thinking": "send it in `chat_template_kwargs`",
    "extra_body": "send its fields beside the others",
    **dict.fromkeys(("max_new_tokens", "n_predict", "num_predict"), "send `max_tokens`"),
    "repeat_penalty": "send `repetition_penalty`",
    "stop_sequences": "send `stop`",
    "conversation": _WHOLE,
    **dict.fromkeys(("function", "functions"), "send `tools`"),
    **dict.fromkeys(("ebnf", "grammar", "guided", "json", "regex"), "send `structured_outputs`"),
    "previous": _WHOLE,
    "priority": "send `class`: interactive, default or batch",
    **dict.fromkeys(("tool", "tools"), "/v1/chat/completions and /v1/responses call functions"),
}


def parse(kind: type[SomeBody], raw: bytes) -> SomeBody:
    """Raises BadInput. Nesting is bounded by the JSON library, size by the port."""
    try:
        given = from_json(raw.removeprefix(BOM), allow_inf_nan=False)
    except ValueError as error:
        raise BadInput("body", f"no JSON: {error}") from None
    if not isinstance(given, dict):
        raise BadInput("body", "must be a JSON object")
    _refuse(kind, given)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _bad_input(error.errors(include_url=False, include_input=False)) from None


def unknown(body: Body) -> list[str]:
    """Fields that nobody here knows, and that are ignored."""
    known = _accepted(type(body)) | _refused(type(body)).keys()
    return [name for name in body.model_extra or () if name not in known]


@cache
def _refused(kind: type[Body]) -> Mapping[str, tuple[Any, ...]]:
    """Fields that would change the answer, and that this kind of body does not have, with the values that ask for
    nothing: those that nobody serves, and those of the other endpoints that answer."""
    if kind not in ANSWERING:
        return EVERYWHERE
    refused: dict[str, tuple[Any, ...]] = dict(EVERYWHERE)
    for other in ANSWERING:
        for name, field in _fields(other).items():
            refused[name] = (*refused.get(name, ()), field.default)
    refused |= {"tool_choice": ("none", "auto")}  # without tools
    refused |= {"add_special_tokens": (kind is Completion,)}  # a template writes its own
    refused |= REFUSED
    taken = _fields(kind).keys() | _accepted(kind)
    return {name: values for name, values in refused.items() if name not in taken}


def _accepted(kind: type[Body]) -> frozenset[str]:
    return ACCEPTED | ACCEPTED_RESPONSES if kind is Responses else ACCEPTED


def _refuse(kind: type[Body], given: dict[str, Any]) -> None:
    """Raises Unsupported for a field that would change the answer."""
    refused = _refused(kind)
    for name, value in given.items():
        if name not in refused:
            continue
        asks_nothing = value is None or value in refused[name] or (name == "best_of" and value == (given.get("n") or 1))
        if not asks_nothing:
            hint = HINTS.get(name) or HINTS.get(name.partition("_")[0]) or ""
            helps = hint and _fields(kind).keys() >= set(re.findall("`(.+?)`", hint))
            raise Unsupported(name, "not supported" + (f"; {hint}" if helps else ""))


def _bad_input(errors: list[ErrorDetails]) -> BadInput:
    """A field that may be of several kinds has a complaint from each kind: those that got furthest are told."""
    first = errors[0]["loc"][:1]
    same = [error for error in errors if error["loc"][:1] == first]
    deepest = max(len(error["loc"]) for error in same)
    told = [error for error in same if len(error["loc"]) == deepest]
    path = _path(told[0]["loc"])
    problems = dict.fromkeys(_problem(error) for error in told if _path(error["loc"]) == path)
    return BadInput(path or "body", " or ".join(problems))


def _problem(error: ErrorDetails) -> str:
    return "missing" if error["type"] == "missing" else error["msg"].removeprefix("Value error, ")


def _path(location: Iterable[int | str]) -> str:
    """Such as `messages[0].content`: names of kinds, and of fields that are the client's own, are left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in _NAMES:
            path += f".{part}" if path else part
    return path


def _fields(kind: type[Body]) -> dict[str, FieldInfo]:
    return {field.alias or name: field for name, field in kind.model_fields.items()}


def _kinds(kind: type[Body]) -> Iterable[type[Body]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


_NAMES = frozenset(name for kind in _kinds(Body) for name in _fields(kind))
