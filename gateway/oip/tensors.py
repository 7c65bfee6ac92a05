"""Tensors of the Open Inference Protocol, each of one element: which ones the model takes and gives, and how a value is
read and written. What the values mean, request.py knows; no RPC lives here."""

import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from protos.errors import BadInput
from protos.oip import inference_pb2 as pb

Value = bytes | bool | int


class Tensor(NamedTuple):
    name: str
    datatype: str
    data_type: pb.DataType.ValueType
    optional: bool = True


INPUTS = {
    tensor.name: tensor
    for tensor in (
        Tensor("text_input", "BYTES", pb.TYPE_STRING, optional=False),
        Tensor("stream", "BOOL", pb.TYPE_BOOL),
        Tensor("sampling_parameters", "BYTES", pb.TYPE_STRING),
        Tensor("exclude_input_in_output", "BOOL", pb.TYPE_BOOL),
        Tensor("return_finish_reason", "BOOL", pb.TYPE_BOOL),
        Tensor("return_logprobs", "BOOL", pb.TYPE_BOOL),
        Tensor("return_num_input_tokens", "BOOL", pb.TYPE_BOOL),
        Tensor("return_num_output_tokens", "BOOL", pb.TYPE_BOOL),
    )
}
OUTPUTS = {
    tensor.name: tensor
    for tensor in (
        Tensor("text_output", "BYTES", pb.TYPE_STRING, optional=False),
        Tensor("finish_reason", "BYTES", pb.TYPE_STRING),
        Tensor("logprobs", "BYTES", pb.TYPE_STRING),
        Tensor("num_input_tokens", "UINT32", pb.TYPE_UINT32),
        Tensor("num_output_tokens", "UINT32", pb.TYPE_UINT32),
    )
}


def read(request: pb.ModelInferRequest) -> dict[str, Value]:
    """The values of the inputs, by name. Raises BadInput, which names the tensor."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise BadInput("raw_input_contents", f"{len(raw)} for {len(request.inputs)} inputs")
    values: dict[str, Value] = {}
    for number, given in enumerate(request.inputs):
        name = given.name[:64]
        if (known := INPUTS.get(given.name)) is None:
            raise BadInput(name or "inputs", f"unknown input; known are {', '.join(INPUTS)}")
        if given.name in values:
            raise BadInput(name, "given twice")
        if given.datatype != known.datatype:
            raise BadInput(name, f"its datatype is {known.datatype}, not {given.datatype[:16]!r}")
        if any(size != 1 for size in given.shape):
            raise BadInput(name, f"its shape is [1], not {list(given.shape)[:8]}")
        values[given.name] = _raw(known, raw[number]) if raw else _content(known, given.contents)
    for tensor in INPUTS.values():
        if not tensor.optional and tensor.name not in values:
            raise BadInput(tensor.name, "missing")
    return values


def _raw(tensor: Tensor, data: bytes) -> Value:
    if tensor.datatype == "BOOL" and len(data) == 1:
        return data != b"\0"
    if tensor.datatype == "BYTES" and len(data) >= 4 and int.from_bytes(data[:4], "little") == len(data) - 4:
        return data[4:]
    raise BadInput(tensor.name, f"its raw contents are not one element of {tensor.datatype}")


def _content(tensor: Tensor, contents: pb.InferTensorContents) -> Value:
    given: Any = contents.bool_contents if tensor.datatype == "BOOL" else contents.bytes_contents
    if len(given) != 1:
        raise BadInput(tensor.name, f"{len(given)} elements, not 1")
    value: Value = given[0]
    return value


_WRITERS: dict[str, Callable[[Any], bytes]] = {
    "BYTES": lambda value: struct.pack("<I", len(value)) + value,
    "UINT32": lambda value: struct.pack("<I", value),
}


def write(response: pb.ModelInferResponse, values: Mapping[str, bytes | int]) -> None:
    """Add outputs, by name."""
    for name, value in values.items():
        response.outputs.add(name=name, datatype=OUTPUTS[name].datatype, shape=[1])
        response.raw_output_contents.append(_WRITERS[OUTPUTS[name].datatype](value))


def metadata(tensors: Iterable[Tensor]) -> list[pb.ModelMetadataResponse.TensorMetadata]:
    return [
        pb.ModelMetadataResponse.TensorMetadata(name=tensor.name, datatype=tensor.datatype, shape=[1])
        for tensor in tensors
    ]


def configuration(name: str, platform: str) -> pb.ModelConfig:
    return pb.ModelConfig(
        name=name,
        platform=platform,
        backend=platform,
        input=[
            pb.ModelInput(name=own.name, data_type=own.data_type, dims=[1], optional=own.optional)
            for own in INPUTS.values()
        ],
        output=[pb.ModelOutput(name=own.name, data_type=own.data_type, dims=[1]) for own in OUTPUTS.values()],
        model_transaction_policy=pb.ModelTransactionPolicy(decoupled=True),
    )
