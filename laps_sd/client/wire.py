"""What the client takes from the wire: generated code, the table of errors, options of connections. No other file of
the client imports `protos`: in the client's own wheel these modules lie in `laps_sd._protos` (deploy/client)."""

from protos.channels import PUBLIC_MESSAGE_BYTES, is_loopback, options
from protos.errors import (
    DETAILS_KEY,
    BadInput,
    BeyondEnd,
    DeadlinePassed,
    DuplicateRequest,
    Failed,
    Forbidden,
    Incompatible,
    Lost,
    NotServing,
    QueueFull,
    RequestError,
    Unauthenticated,
    UnknownRequest,
    from_call,
)
from protos.v1 import inference_pb2, inference_pb2_grpc, status_pb2, types_pb2

__all__ = [
    "DETAILS_KEY",
    "PUBLIC_MESSAGE_BYTES",
    "BadInput",
    "BeyondEnd",
    "DeadlinePassed",
    "DuplicateRequest",
    "Failed",
    "Forbidden",
    "Incompatible",
    "Lost",
    "NotServing",
    "QueueFull",
    "RequestError",
    "Unauthenticated",
    "UnknownRequest",
    "from_call",
    "inference_pb2",
    "inference_pb2_grpc",
    "is_loopback",
    "options",
    "status_pb2",
    "types_pb2",
]
