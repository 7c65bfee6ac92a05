"""Errors as OpenAI's API tells them: `{"error": {"message", "type", "param", "code"}}`, all four always there. The one
table from RequestError (protos/errors.py) to HTTP; no other status is decided here."""

import math
from typing import Any, NamedTuple

from starlette.responses import JSONResponse

from protos.errors import (
    RETRY_AFTER_KEY,
    BadInput,
    BeyondEnd,
    Cancelled,
    ContextExceeded,
    DeadlinePassed,
    DuplicateRequest,
    Failed,
    Forbidden,
    Lost,
    NotServing,
    QueueFull,
    RequestError,
    Unauthenticated,
    UnknownModel,
    UnknownRequest,
)

RETRY = ("retry-after", RETRY_AFTER_KEY, "x-should-retry")  # headers that tell a client whether to try again, and when
_GIVE_UP = {"x-should-retry": "false"}  # OpenAI's clients try 409 and 5xx again, unless told not to


class Unsupported(BadInput):
    """A field that would change the answer, and that this service does not have."""


class BodyTooLarge(BadInput):
    """The body is longer than the gateway reads."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__("body", f"more than {most_bytes} bytes")


class BodyTooSlow(BadInput):
    """The body was not whole in time. What may still come of it is not read, so the connection is closed."""


class Told(NamedTuple):
    """How a class of errors is told. `type` and `code` are what OpenAI's API has in its place, where it has one."""

    status: int
    type: str
    code: str
    headers: dict[str, str] = {}  # noqa: RUF012


TABLE: dict[type[RequestError], Told] = {
    BadInput: Told(400, "invalid_request_error", "invalid_value"),
    Unsupported: Told(400, "invalid_request_error", "unsupported_parameter"),
    ContextExceeded: Told(400, "invalid_request_error", "context_length_exceeded"),
    BodyTooLarge: Told(413, "invalid_request_error", "request_too_large", {"connection": "close"}),
    BodyTooSlow: Told(408, "invalid_request_error", "request_timeout", {"connection": "close"}),
    Unauthenticated: Told(401, "authentication_error", "invalid_api_key", {"www-authenticate": "Bearer"}),
    Forbidden: Told(403, "permission_error", "permission_denied"),
    UnknownModel: Told(404, "invalid_request_error", "model_not_found"),
    UnknownRequest: Told(404, "invalid_request_error", "request_not_found"),
    DuplicateRequest: Told(409, "invalid_request_error", "duplicate_request", _GIVE_UP),
    BeyondEnd: Told(416, "invalid_request_error", "offset_out_of_range"),
    Cancelled: Told(499, "invalid_request_error", "request_cancelled", _GIVE_UP),
    QueueFull: Told(429, "rate_limit_error", "rate_limit_exceeded"),
    NotServing: Told(503, "server_error", "server_is_overloaded"),
    DeadlinePassed: Told(504, "server_error", "deadline_exceeded", _GIVE_UP),
    Lost: Told(500, "server_error", "data_loss"),
    Failed: Told(500, "server_error", "internal_error"),
}

# Of what no request caused.
CODES = {404: "not_found", 405: "method_not_allowed"}


def told(error: RequestError) -> Told:
    """The entry of the error's class, or of the nearest class above it."""
    return next((TABLE[kind] for kind in type(error).__mro__ if kind in TABLE), TABLE[Failed])


def body(error: RequestError) -> dict[str, Any]:
    """The JSON object that says it: a whole answer, or an event of a stream that has begun."""
    how, param = told(error), error.field if isinstance(error, BadInput) else None
    return {"error": {"message": error.message, "type": how.type, "param": param, "code": how.code}}


def response(error: RequestError) -> JSONResponse:
    """The whole answer to a request that failed before anything was sent."""
    how = told(error)
    headers = dict(how.headers)
    if error.retry_after_ms:
        headers |= {
            "retry-after": str(math.ceil(error.retry_after_ms / 1000)),
            RETRY_AFTER_KEY: str(error.retry_after_ms),
        }
    return JSONResponse(body(error), how.status, headers)


def plain(status: int, message: str) -> JSONResponse:
    """For what no request caused: a path or a method that is not there, bytes that are no request."""
    code = CODES.get(status, "invalid_value")
    return JSONResponse(
        {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}, status
    )


UNREADABLE = bytes(plain(400, "the bytes that came are no request of HTTP/1.1").body)
