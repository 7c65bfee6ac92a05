"""The one table of errors and gRPC statuses. No transport lives here, and no service.

RequestError               what a client is told: a status, a message, perhaps a hint when to retry
├── BadInput               INVALID_ARGUMENT     the message starts with the field's name
├── Unauthenticated        UNAUTHENTICATED      no API key, or none that is known
├── Forbidden              PERMISSION_DENIED    the key lacks the right
├── UnknownRequest         NOT_FOUND
├── DuplicateRequest       ALREADY_EXISTS
├── QueueFull              RESOURCE_EXHAUSTED   retry after `retry_after_ms`
├── NotServing             UNAVAILABLE          draining, or no warmed worker: retry elsewhere or later
├── DeadlinePassed         DEADLINE_EXCEEDED
├── Lost                   DATA_LOSS            a stream that cannot be continued without a gap
└── Failed                 INTERNAL             the worker could not run it
"""

from typing import ClassVar

import grpc

RETRY_AFTER_KEY = "retry-after-ms"
REQUEST_ID_KEY = "x-request-id"


class RequestError(Exception):
    """An error that a client sees. `code` is its gRPC status; `retry_after_ms` 0 gives no hint."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN

    def __init__(self, message: str, *, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_ms = retry_after_ms

    @property
    def trailers(self) -> tuple[tuple[str, str], ...]:
        return ((RETRY_AFTER_KEY, str(self.retry_after_ms)),) if self.retry_after_ms else ()


class BadInput(RequestError):
    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")


class Unauthenticated(RequestError):
    code = grpc.StatusCode.UNAUTHENTICATED


class Forbidden(RequestError):
    code = grpc.StatusCode.PERMISSION_DENIED


class UnknownRequest(RequestError):
    code = grpc.StatusCode.NOT_FOUND


class DuplicateRequest(RequestError):
    code = grpc.StatusCode.ALREADY_EXISTS


class QueueFull(RequestError):
    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class NotServing(RequestError):
    code = grpc.StatusCode.UNAVAILABLE


class DeadlinePassed(RequestError):
    code = grpc.StatusCode.DEADLINE_EXCEEDED


class Lost(RequestError):
    code = grpc.StatusCode.DATA_LOSS


class Failed(RequestError):
    code = grpc.StatusCode.INTERNAL


_BY_CODE: dict[int, type[RequestError]] = {
    kind.code.value[0]: kind
    for kind in (
        Unauthenticated,
        Forbidden,
        UnknownRequest,
        DuplicateRequest,
        QueueFull,
        NotServing,
        DeadlinePassed,
        Lost,
        Failed,
    )
}


def from_code(code: int, message: str, retry_after_ms: int = 0) -> RequestError:
    """The error that a status code on the wire (Refusal.code) stands for."""
    if code == grpc.StatusCode.INVALID_ARGUMENT.value[0]:
        field, _, problem = message.partition(": ")
        return BadInput(field, problem)
    return _BY_CODE.get(code, Failed)(message, retry_after_ms=retry_after_ms)
