"""What one inference asks for: tensors and parameters in, a GenerateRequest and the wanted outputs out. Numbers may be
strings, since Triton's own sample client sends them so. No RPC lives here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from gateway.oip.tensors import OUTPUTS, Value, read
from protos.errors import BadInput
from protos.oip import inference_pb2 as pb
from protos.v1 import inference_pb2, types_pb2

DEFAULT_TEMPERATURE = 1.0  # as in Triton's backends; on our own interface it is 0
MOST_US = 10**12


@dataclass(frozen=True, slots=True)
class Asked:
    """`outputs`: names of the tensors to answer with."""

    request: inference_pb2.GenerateRequest
    stream: bool
    prompt_in_front: str
    outputs: frozenset[str]
    timeout_s: float | None


def understand(request: pb.ModelInferRequest) -> Asked:
    """Raises BadInput, which names the tensor or the parameter."""
    values = read(request)
    text, stream = _text("text_input", values["text_input"]), bool(values.get("stream", False))
    if stream and values.get("exclude_input_in_output") is False:
        raise BadInput("exclude_input_in_output", "a stream never repeats its input")
    in_front = "" if stream or values.get("exclude_input_in_output") else text
    parameters = {key: _plain(value) for key, value in request.parameters.items()}
    timeout_us = parameters.pop("timeout", None)
    sampling = {key: value for key, value in parameters.items() if key in _FIELDS} | _sampling(values)
    generate = inference_pb2.GenerateRequest(prompt=text, temperature=DEFAULT_TEMPERATURE)
    for name, value in sampling.items():
        _set(generate, name, value)
    if values.get("return_logprobs") and not generate.HasField("logprobs"):
        generate.logprobs = 0
    return Asked(
        generate,
        stream,
        in_front,
        _outputs(request, values),
        None if timeout_us is None else _number("timeout", timeout_us, float, 1, MOST_US) / 1e6,
    )


def _outputs(request: pb.ModelInferRequest, values: Mapping[str, Value]) -> frozenset[str]:
    wanted = {name for name in OUTPUTS if values.get(f"return_{name}")} | {"text_output"}
    if request.outputs:
        named = {output.name for output in request.outputs}
        if unknown := sorted(named - OUTPUTS.keys()):
            raise BadInput("outputs", f"unknown output {unknown[0][:64]!r}; known are {', '.join(OUTPUTS)}")
        wanted |= named
    return frozenset(wanted)


def _sampling(values: Mapping[str, Value]) -> dict[str, Any]:
    """The JSON object of the tensor `sampling_parameters`."""
    text = _text("sampling_parameters", values.get("sampling_parameters", b""))
    try:
        given = from_json(text) if text.strip() else {}
    except ValueError as error:
        raise BadInput("sampling_parameters", f"no JSON: {str(error)[:100]}") from None
    if not isinstance(given, dict):
        raise BadInput("sampling_parameters", "must be a JSON object")
    return given


def _text(name: str, value: Value) -> str:
    assert isinstance(value, bytes)
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise BadInput(name, "not UTF-8") from None


def _plain(value: pb.InferParameter) -> Any:
    kind = value.WhichOneof("parameter_choice")
    return getattr(value, kind) if kind else None


def _set(generate: inference_pb2.GenerateRequest, name: str, value: Any) -> None:
    field = f"sampling_parameters.{name[:64]}"
    if value is None:
        return
    if (setter := _FIELDS.get(name)) is None:
        raise BadInput(field, f"unknown; known are {', '.join(_FIELDS)}")
    setter(generate, field, value)


Setter = Callable[[inference_pb2.GenerateRequest, str, Any], None]


def _whole(attribute: str, least: int = 0, most: int = 2**32 - 1) -> Setter:
    def set(generate: inference_pb2.GenerateRequest, field: str, value: Any) -> None:
        setattr(generate, attribute, _number(field, value, int, least, most))

    return set


def _fraction(attribute: str) -> Setter:
    def set(generate: inference_pb2.GenerateRequest, field: str, value: Any) -> None:
        setattr(generate, attribute, _number(field, value, float, -1e6, 1e6))

    return set


def _number(field: str, value: Any, kind: type[int] | type[float], least: float, most: float) -> Any:
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError
        number = kind(value)
        if isinstance(value, float) and number != value:
            raise ValueError
    except (ValueError, OverflowError):
        raise BadInput(field, f"must be a {'whole ' if kind is int else ''}number, not {str(value)[:40]!r}") from None
    if not least <= number <= most:
        raise BadInput(field, f"must be in [{least:.15g}, {most:.15g}], not {str(value)[:40]}")
    return number


def _truth(attribute: str) -> Setter:
    def set(generate: inference_pb2.GenerateRequest, field: str, value: Any) -> None:
        truths = {True: True, False: False, "true": True, "false": False, "True": True, "False": False}
        if not isinstance(value, (bool, str)) or value not in truths:
            raise BadInput(field, f"must be true or false, not {str(value)[:40]!r}")
        setattr(generate, attribute, truths[value])

    return set


def _top_k(generate: inference_pb2.GenerateRequest, field: str, value: Any) -> None:
    generate.top_k = max(0, _number(field, value, int, -1, 2**32 - 1))  # -1: all, as in vLLM


def _seed(generate: inference_pb2.GenerateRequest, field: str, value: Any) -> None:
    generate.seed = _number(field, value, int, -(2**63), 2**64 - 1) % 2**64


def _stop(generate: inference_pb2.GenerateRequest, field: str, value: Any) -> None:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise BadInput(field, "must be a string or a list of strings")
    generate.stop.extend(stops)


def _one(generate: inference_pb2.GenerateRequest, field: str, value: Any) -> None:
    if _number(field, value, int, 1, 2**32 - 1) != 1:
        raise BadInput(field, "one answer a request; send the request several times")


def _request_id(generate: inference_pb2.GenerateRequest, field: str, value: Any) -> None:
    if not isinstance(value, str) or not value.isascii():
        raise BadInput(field, "must be a string of ASCII characters")
    generate.request_id = value


def _class(generate: inference_pb2.GenerateRequest, field: str, value: Any) -> None:
    names = {name.removeprefix("PRIORITY_").lower(): number for name, number in types_pb2.Priority.items() if number}
    if not isinstance(value, str) or value not in names:
        raise BadInput(field, f"must be one of {', '.join(names)}")
    generate.priority = names[value]


# Names of vLLM's sampling parameters, then our own.
_FIELDS: dict[str, Setter] = {
    "max_tokens": _whole("max_tokens"),
    "min_tokens": _whole("min_tokens"),
    "temperature": _fraction("temperature"),
    "top_p": _fraction("top_p"),
    "top_k": _top_k,
    "seed": _seed,
    "stop": _stop,
    "ignore_eos": _truth("ignore_eos"),
    "repetition_penalty": _fraction("repetition_penalty"),
    "presence_penalty": _fraction("presence_penalty"),
    "frequency_penalty": _fraction("frequency_penalty"),
    "logprobs": _whole("logprobs"),
    "n": _one,
    "predicted_tokens": _whole("predicted_tokens"),
    "request_id": _request_id,
    "class": _class,
}
