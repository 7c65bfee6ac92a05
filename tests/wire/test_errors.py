"""A status tells programs why: google.rpc details beside the message and the trailer."""

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from protos.errors import (
    DOMAIN,
    MAX_MESSAGE_BYTES,
    BadInput,
    ContextExceeded,
    LastWorker,
    NotServing,
    QueueFull,
    RequestError,
    UnknownWorker,
    from_call,
    from_code,
)
from protos.times import seconds


def details(error: RequestError) -> dict[str, object]:
    """By the name of their type, out of the trailers that end a call."""
    status = status_pb2.Status.FromString(dict(error.trailers)[rpc_status.GRPC_DETAILS_METADATA_KEY])
    assert (status.code, status.message) == (error.code.value[0], error.message)
    found = {}
    for packed in status.details:
        kind = getattr(error_details_pb2, packed.TypeName().rpartition(".")[2])
        packed.Unpack(detail := kind())
        found[kind.__name__] = detail
    return found


def test_every_error_has_a_reason() -> None:
    info = details(NotServing("no warmed worker"))["ErrorInfo"]
    assert (info.reason, info.domain) == ("NOT_SERVING", DOMAIN)


def test_bad_input_names_the_field() -> None:
    (violation,) = details(BadInput("max_tokens", "must be at least 1"))["BadRequest"].field_violations
    assert (violation.field, violation.description) == ("max_tokens", "must be at least 1")


def test_a_hint_when_to_retry_is_told_twice() -> None:
    error = QueueFull("full", retry_after_ms=1500)
    assert seconds(details(error)["RetryInfo"].retry_delay) == 1.5
    assert dict(error.trailers)["retry-after-ms"] == "1500"


def test_without_a_hint_there_is_none() -> None:
    assert "RetryInfo" not in details(QueueFull("full"))


@pytest.mark.parametrize("said", ["x", "说", "🦊"])
def test_a_long_message_is_cut_since_it_must_fit_into_the_trailers(said: str) -> None:
    error = BadInput("chat", said * 100_000)
    assert len(error.message.encode()) == pytest.approx(MAX_MESSAGE_BYTES, abs=3)
    assert error.message.startswith(f"chat: {said}{said}")
    assert len(dict(error.trailers)[rpc_status.GRPC_DETAILS_METADATA_KEY]) < 4 * MAX_MESSAGE_BYTES


@pytest.mark.parametrize("kind", [kind for kind in RequestError.__subclasses__() if kind not in (BadInput, LastWorker)])
def test_an_error_is_known_by_its_code(kind: type[RequestError]) -> None:
    error = from_code(kind.code.value[0], "why", 5)
    assert (type(error), error.message, error.retry_after_ms) == (kind, "why", 5)


def test_an_unknown_code_is_a_failure() -> None:
    assert from_code(grpc.StatusCode.UNIMPLEMENTED.value[0], "why").code is grpc.StatusCode.INTERNAL


def ended(error: RequestError, *trailers: tuple[str, str | bytes]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(error.code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), error.message)


@pytest.mark.parametrize(
    "error",
    [UnknownWorker("why"), LastWorker("why"), ContextExceeded("prompt", "why"), QueueFull("why", retry_after_ms=7)],
)
def test_an_error_crosses_services_as_what_it_is(error: RequestError) -> None:
    there = from_call(ended(error, *error.trailers))
    assert (type(there), there.message, there.retry_after_ms) == (type(error), error.message, error.retry_after_ms)


@pytest.mark.parametrize("details", [None, b"", b"\xff", b"\x08\x05"])
def test_a_status_without_our_details_is_known_by_its_code(details: bytes | None) -> None:
    trailers = [] if details is None else [(rpc_status.GRPC_DETAILS_METADATA_KEY, details)]
    assert type(from_call(ended(NotServing("why"), *trailers))) is NotServing
