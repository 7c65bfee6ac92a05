"""The one table of errors and gRPC statuses. No transport lives here, and no service.

RequestError               what a client is told: a status, a message, perhaps a hint when to retry
├── BadInput               INVALID_ARGUMENT     the message starts with the field's name
│   └── ContextExceeded    INVALID_ARGUMENT     prompt and answer together do not fit the model
├── Unauthenticated        UNAUTHENTICATED      no API key, or none that is known
├── Forbidden              PERMISSION_DENIED    the key lacks the right
├── UnknownRequest         NOT_FOUND
│   ├── UnknownModel       NOT_FOUND
│   └── UnknownWorker      NOT_FOUND
├── DuplicateRequest       ALREADY_EXISTS
├── QueueFull              RESOURCE_EXHAUSTED   retry after `retry_after_ms`
├── NotServing             UNAVAILABLE          draining, or no warmed worker: retry elsewhere or later
├── DeadlinePassed         DEADLINE_EXCEEDED
├── BeyondEnd              OUT_OF_RANGE         a stream was to go on from a token that the answer does not have
├── Lost                   DATA_LOSS            a stream that cannot be continued without a gap
├── Incompatible           FAILED_PRECONDITION  two services that share no version of the protocol
├── LastWorker             FAILED_PRECONDITION  a worker was to end, and no other serves
├── Cancelled              CANCELLED            somebody ended the request, by its id, before its answer was whole
└── Failed                 INTERNAL             the worker could not run it

A status carries the same in the details that google.rpc defines: ErrorInfo, whose `reason` is the name of the class in
capitals, RetryInfo, and BadRequest with the field. The trailer `retry-after-ms` says the same as RetryInfo.
"""

import re
from collections.abc import Iterator
from typing import ClassVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from protos.times import duration

RETRY_AFTER_KEY = "retry-after-ms"
REQUEST_ID_KEY = "x-request-id"
DETAILS_KEY = "grpc-status-details-bin"  # in the trailers of every status that a service of ours makes
DOMAIN = "laps-sd"  # of every ErrorInfo
# A status must fit into the trailers, where it is up to three times, with three bytes for each that is not ASCII.
MAX_MESSAGE_BYTES = 1000


def _cut(message: str) -> str:
    return message[:MAX_MESSAGE_BYTES].encode(errors="replace")[:MAX_MESSAGE_BYTES].decode(errors="ignore")


class RequestError(Exception):
    """An error that a client sees. `code` is its gRPC status; `retry_after_ms` 0 gives no hint."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    reason: ClassVar[str] = "REQUEST_ERROR"

    def __init_subclass__(cls) -> None:
        cls.reason = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).upper()

    def __init__(self, message: str, *, retry_after_ms: int = 0) -> None:
        message = _cut(message)
        super().__init__(message)
        self.message = message
        self.retry_after_ms = retry_after_ms

    @property
    def status(self) -> status_pb2.Status:
        """As google.rpc has it, with details."""
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        for detail in self._details():
            status.details.add().Pack(detail)
        return status

    def _details(self) -> list[object]:
        details: list[object] = [error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN)]
        if self.retry_after_ms:
            details.append(error_details_pb2.RetryInfo(retry_delay=duration(self.retry_after_ms / 1000)))
        return details

    @property
    def trailers(self) -> tuple[tuple[str, str | bytes], ...]:
        """The metadata that ends a call with this error."""
        hint = ((RETRY_AFTER_KEY, str(self.retry_after_ms)),) if self.retry_after_ms else ()
        return (*hint, *rpc_status.to_status(self.status).trailing_metadata)


class BadInput(RequestError):
    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field, self.problem = field, problem

    def _details(self) -> list[object]:
        violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=_cut(self.problem))
        return [*super()._details(), error_details_pb2.BadRequest(field_violations=[violation])]


class ContextExceeded(BadInput):
    pass


class Unauthenticated(RequestError):
    code = grpc.StatusCode.UNAUTHENTICATED


class Forbidden(RequestError):
    code = grpc.StatusCode.PERMISSION_DENIED


class UnknownRequest(RequestError):
    code = grpc.StatusCode.NOT_FOUND


class UnknownModel(UnknownRequest):
    pass


class UnknownWorker(UnknownRequest):
    pass


class DuplicateRequest(RequestError):
    code = grpc.StatusCode.ALREADY_EXISTS


class QueueFull(RequestError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class NotServing(RequestError):
    code = grpc.StatusCode.UNAVAILABLE


class DeadlinePassed(RequestError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED


class BeyondEnd(RequestError):
    code = grpc.StatusCode.OUT_OF_RANGE


class Lost(RequestError):
    code = grpc.StatusCode.DATA_LOSS


class Incompatible(RequestError):
    code = grpc.StatusCode.FAILED_PRECONDITION


class LastWorker(RequestError):
    code = grpc.StatusCode.FAILED_PRECONDITION


class Cancelled(RequestError):
    code = grpc.StatusCode.CANCELLED


class Failed(RequestError):
    code = grpc.StatusCode.INTERNAL


def _kinds(kind: type[RequestError]) -> Iterator[type[RequestError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


# Of two kinds with one code the more general one.
_BY_CODE = {kind.code.value[0]: kind for kind in RequestError.__subclasses__() if kind is not LastWorker}
_BY_REASON = {kind.reason: kind for kind in _kinds(RequestError)}


def from_code(code: int, message: str, retry_after_ms: int = 0) -> RequestError:
    """The error that a status code on the wire (Refusal.code) stands for."""
    return _made(_BY_CODE.get(code, Failed), message, retry_after_ms)


def from_call(error: grpc.RpcError) -> RequestError:
    """The error that a call ended with: of the class that the details of its status name, else as its code says."""
    trailers = {str(key): value for key, value in error.trailing_metadata() or ()}
    told = str(trailers.get(RETRY_AFTER_KEY, "0"))
    kind = _BY_REASON.get(_reason(trailers.get(DETAILS_KEY, b"")))
    if kind is None or kind.code is not error.code():
        kind = _BY_CODE.get(error.code().value[0], Failed)
    return _made(kind, error.details() or error.code().name, int(told) if told.isdecimal() else 0)


def _made(kind: type[RequestError], message: str, retry_after_ms: int) -> RequestError:
    if issubclass(kind, BadInput):
        field, _, problem = message.partition(": ")
        return kind(field, problem)
    return kind(message, retry_after_ms=retry_after_ms)


def _reason(details: bytes) -> str:
    """Of the first ErrorInfo of a google.rpc.Status; empty if there is none."""
    info = error_details_pb2.ErrorInfo()
    try:
        any(detail.Unpack(info) for detail in status_pb2.Status.FromString(details).details)
    except DecodeError:
        return ""
    return str(info.reason)
