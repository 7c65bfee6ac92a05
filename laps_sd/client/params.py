"""What may be asked of a generation: the parameters by name and type, and the message that they become. What a value
must be beyond its type (a temperature in [0, 2]) is the server's to say. Nothing is sent from here."""

import json
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, Literal, TypedDict, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from laps_sd.client.results import Priority
from laps_sd.client.wire import BadInput, inference_pb2, types_pb2

OnDisconnect = Literal["cancel", "detach"]


class Params(TypedDict, total=False):
    """The fields of GenerateRequest (protos/v1/inference.proto); None is the same as leaving one out. Of the input
    (`prompt`, `messages`, `tokens`) exactly one is given, of the structures (`json_schema` to `lark`) at most one."""

    messages: Sequence[Mapping[str, str]] | None  # a conversation: each message has `role` and `content`
    tokens: Sequence[int] | None  # a prompt of token ids
    max_tokens: int | None  # default: 256, or what the context has room for
    min_tokens: int | None
    temperature: float | None  # in [0, 2]; default 0: greedy
    top_p: float | None  # in (0, 1]
    top_k: int | None  # 0: all
    stop: Sequence[str] | None  # at most 8
    seed: int | None
    ignore_eos: bool | None
    predicted_tokens: int | None  # a guess of the output's length, for the order of service
    priority: Priority | None
    on_disconnect: OnDisconnect | None  # detach: a lost connection does not end the request
    request_id: str | None  # sent twice under it, a request runs once
    repetition_penalty: float | None  # in [0.01, 2]
    presence_penalty: float | None  # in [-2, 2]
    frequency_penalty: float | None  # in [-2, 2]
    logit_bias: Mapping[int, float] | None  # by token id, each in [-100, 100]
    logprobs: int | None  # that many likeliest tokens at each position, at most 20
    json_schema: Mapping[str, Any] | str | None  # a JSON schema that the output follows
    json_object: bool | None  # any JSON object
    regex: str | None  # of the whole output
    choice: Sequence[str] | None  # one of these texts
    lark: str | None  # a grammar in the syntax of llguidance
    prompt_logprobs: int | None  # the same of the prompt
    embedding: bool | None  # of the prompt: with max_tokens=0 nothing else is made
    model: str | None  # its name; needed where the service has several


INPUTS = ("prompt", "messages", "tokens")
STRUCTURES = ("json_schema", "json_object", "regex", "choice", "lark")
Filled = TypeVar("Filled", bound=Message)
_FIELDS = inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name
_UINT = {FieldDescriptor.CPPTYPE_UINT32: 2**32 - 1, FieldDescriptor.CPPTYPE_UINT64: 2**64 - 1}


def generate_request(call: str, prompt: str | None, params: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    """The message. `call`: whose arguments they are. Raises BadInput that names the parameter; TypeError for a name
    that there is not, as Python does."""
    for name in params:
        if name not in Params.__annotations__:
            close = get_close_matches(name, Params.__annotations__, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}{hint}")
    given = {name: value for name, value in {"prompt": prompt, **params}.items() if value is not None}
    inputs = [name for name in INPUTS if name in given]
    if len(inputs) != 1:
        raise BadInput(" and ".join(inputs or INPUTS), "give one of prompt, messages and tokens")
    request = inference_pb2.GenerateRequest()
    _set_structure(request.structure, {name: given.pop(name) for name in STRUCTURES if name in given})
    if not request.structure.WhichOneof("kind"):
        request.ClearField("structure")
    for name, value in given.items():
        if name == "messages":
            request.chat.messages.extend(_message(at, message) for at, message in enumerate(_list(name, value)))
        elif name == "tokens":
            request.tokens.ids.extend(_whole(name, each, 2**32 - 1) for each in _list(name, value))
        elif name == "stop":
            request.stop.extend(_text(name, each) for each in _list(name, value))
        elif name == "logit_bias":
            if not isinstance(value, Mapping):
                raise _wrong(name, "a mapping from token ids to numbers", value)
            request.logit_bias.update({_whole(name, t, 2**32 - 1): _number(name, bias) for t, bias in value.items()})
        else:
            setattr(request, name, _scalar(_FIELDS[name], value))
    return request


def filled(message: Filled, **fields: object) -> Filled:
    """The message with these fields, none of them repeated or a message. Raises BadInput."""
    for name, value in fields.items():
        setattr(message, name, _scalar(message.DESCRIPTOR.fields_by_name[name], value))
    return message


def _set_structure(structure: types_pb2.Structure, given: Mapping[str, Any]) -> None:
    if len(given) > 1:
        raise BadInput(" and ".join(given), "give one of them at most")
    for name, value in given.items():
        if name == "choice":
            structure.choice.texts.extend(_text(name, each) for each in _list(name, value))
        elif name == "json_object":
            if _flag(name, value):
                structure.json_object = True
        elif name == "json_schema" and not isinstance(value, str):
            if not isinstance(value, Mapping):
                raise _wrong(name, "a JSON schema, as a mapping or as text", value)
            try:
                structure.json_schema = json.dumps(value)
            except (TypeError, ValueError, RecursionError) as error:
                raise BadInput(name, f"is no JSON: {error}") from error
        else:
            setattr(structure, name, _text(name, value))


def _message(at: int, message: Any) -> inference_pb2.ChatMessage:
    name = f"messages[{at}]"
    if not isinstance(message, Mapping) or not message.keys() <= {"role", "content"}:
        raise _wrong(name, "a mapping with role and content", message)
    return inference_pb2.ChatMessage(**{key: _text(f"{name}.{key}", text) for key, text in message.items()})


def _scalar(field: Any, value: Any) -> Any:
    """`value`, if it is one for the field."""
    if field.enum_type is not None:
        return _enum(field, value)
    if field.cpp_type in _UINT:
        return _whole(field.name, value, _UINT[field.cpp_type])
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return _flag(field.name, value)
    return (_text if field.cpp_type == FieldDescriptor.CPPTYPE_STRING else _number)(field.name, value)


def _enum(field: Any, word: Any) -> int:
    """The number of a word such as `batch`."""
    prefix = field.enum_type.values[0].name.removesuffix("UNSPECIFIED")
    words = {value.name.removeprefix(prefix).lower(): value.number for value in field.enum_type.values[1:]}
    if not isinstance(word, str) or word not in words:
        raise _wrong(field.name, f"one of {', '.join(words)}", word)
    number: int = words[word]
    return number


def _whole(name: str, value: Any, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise _wrong(name, "a whole number", value)
    number = int(value)
    if not 0 <= number <= most:
        raise _wrong(name, f"from 0 to {most}", value)
    return number


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _wrong(name, "a number", value)
    try:
        return float(value)
    except OverflowError:
        raise _wrong(name, "a number of a usual size", value) from None


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, "True or False", value)
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(name, "text", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadInput(name, f"is no Unicode text: {error.reason} at character {error.start}") from None
    return value


def _list(name: str, value: Any) -> Iterable[Any]:
    """`value`, if it is a list or anything like it; a text, though it can be read letter by letter, is not."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise _wrong(name, "a list", value)
    return value


def _wrong(name: str, expected: str, value: object) -> BadInput:
    return BadInput(name, f"must be {expected}, not {value!r:.100}")
