"""Which calls are made again, and when: decided without a connection, under a clock of the test's."""

from typing import Any

import grpc
import pytest

from laps_sd.client.attempts import MOST_TOLD_S, RESUME_S, Attempts, generating, of_the_connection
from protos.errors import BadInput, NotServing, QueueFull, RequestError
from protos.v1 import inference_pb2, types_pb2
from tests.client.scripted import chunk, last


class Status(grpc.RpcError):
    """How a call ended."""

    def __init__(self, code: grpc.StatusCode, details: str = "", trailers: Any = ()) -> None:
        self._said = code, details, trailers

    def code(self) -> grpc.StatusCode:
        return self._said[0]

    def details(self) -> str:
        return self._said[1]

    def trailing_metadata(self) -> Any:
        return self._said[2]


def said(error: RequestError) -> Status:
    return Status(error.code, error.message, error.trailers)


BROKEN = Status(grpc.StatusCode.UNAVAILABLE, "Socket closed")
NOBODY = Status(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; last error: ...")
FULL = said(QueueFull("full", retry_after_ms=500))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Without the draw that keeps clients from coming back together."""
    monkeypatch.setattr("random.uniform", lambda low, high: low)
    return Clock()


def attached(clock: Clock, **more: Any) -> Attempts:
    return Attempts(inference_pb2.GenerateRequest(prompt="a"), max_retries=2, again=False, clock=clock, **more)


def test_a_refusal_that_says_when_to_come_back_is_repeated_then_and_not_for_ever(clock: Clock) -> None:
    attempts = attached(clock)
    assert [attempts.pause_s(FULL) for _ in range(3)] == [0.5, 0.5, None]


@pytest.mark.parametrize("refusal", [QueueFull("cut off"), BadInput("a", "b"), NotServing("away")])
def test_a_refusal_that_says_nothing_of_the_kind_is_final(clock: Clock, refusal: RequestError) -> None:
    assert attached(clock).pause_s(said(refusal)) is None


def test_a_time_too_long_is_not_waited_for(clock: Clock) -> None:
    ms = int(1000 * MOST_TOLD_S) + 1
    resumed = Attempts(inference_pb2.ResumeRequest(), max_retries=2, patience_s=RESUME_S, clock=clock)
    for attempts, refusal in ((attached(clock), QueueFull), (resumed, NotServing)):
        assert attempts.pause_s(said(refusal("later", retry_after_ms=ms))) is None


def test_a_pause_that_ends_after_the_deadline_is_not_begun(clock: Clock) -> None:
    attempts = attached(clock, timeout_s=0.6)
    assert attempts.pause_s(FULL) == 0.5
    clock.now += 0.5
    assert attempts.remaining_s == pytest.approx(0.1)
    assert attempts.pause_s(FULL) is None


def test_a_server_that_was_not_reached_is_tried_again(clock: Clock) -> None:
    assert [attached(clock).pause_s(NOBODY), attached(clock).pause_s(BROKEN)] == [0.1, None]


def test_a_call_that_the_server_has_not_begun_is_made_again(clock: Clock) -> None:
    """In a burst a server may count streams that the client has closed already."""
    said = "Stream removed (RST_STREAM (Received RST_STREAM with error code 7))"
    assert attached(clock).pause_s(Status(grpc.StatusCode.UNAVAILABLE, said)) == 0.1
    cancelled = said.replace("7", "8")
    assert attached(clock).pause_s(Status(grpc.StatusCode.UNAVAILABLE, cancelled)) is None


def test_a_retry_is_a_round_of_all_addresses_that_nobody_answers(clock: Clock) -> None:
    """In turn. One that answers ends the round."""
    attempts = Attempts(inference_pb2.GenerateRequest(), max_retries=2, again=False, clock=clock)
    assert [attempts.pause_s(NOBODY, 3) for _ in range(6)] == [0.1, 0.1, 0.1, 0.2, 0.2, 0.2]
    assert [attempts.pause_s(NOBODY, 3) for _ in range(3)] == [0.4, 0.4, None]
    attempts = Attempts(inference_pb2.GenerateRequest(), max_retries=1, again=False, clock=clock)
    assert [attempts.pause_s(error, 2) is None for error in (NOBODY, FULL, NOBODY, FULL)] == [False] * 3 + [True]


def test_a_broken_stream_that_hanging_up_ends_is_not_looked_for(clock: Clock) -> None:
    attempts = attached(clock)
    attempts.got(chunk(0, [1, 2]))
    assert [attempts.pause_s(error) for error in (BROKEN, NOBODY, FULL)] == [None, None, None]


def test_a_detached_stream_goes_on_behind_the_last_token_until_patience_ends() -> None:
    request = inference_pb2.GenerateRequest(prompt="a", on_disconnect=types_pb2.ON_DISCONNECT_DETACH)
    attempts = generating(request, 2, None, "drawn")
    attempts.clock = clock = Clock()
    attempts.__post_init__()
    assert attempts.request.request_id == "drawn"
    assert all(attempts.pause_s(BROKEN) is not None for _ in range(9))
    clock.now += RESUME_S / 2
    attempts.got(chunk(3, [1, 2]))
    assert attempts.request == inference_pb2.ResumeRequest(request_id="r", offset=5)
    for _ in range(9):
        clock.now += 2 * RESUME_S  # it waits, or is paused, and then what is between them ends the connection
        assert attempts.pause_s(BROKEN) is not None
    attempts.max_retries = 0
    clock.now += RESUME_S
    assert attempts.pause_s(BROKEN) is None


def test_a_detached_stream_that_comes_to_a_full_gateway_waits_as_it_is_told(clock: Clock) -> None:
    """When a gateway dies its clients come to the others together."""
    request = inference_pb2.GenerateRequest(prompt="a", on_disconnect=types_pb2.ON_DISCONNECT_DETACH)
    attempts = generating(request, 2, None, "drawn")
    attempts.clock = clock
    attempts.got(chunk(0, [1, 2]))
    assert [attempts.pause_s(error) for error in (BROKEN, FULL, FULL, FULL)] == [0.1, 0.5, 0.5, None]


def test_a_call_that_only_asks_is_repeated_when_its_connection_breaks(clock: Clock) -> None:
    attempts = Attempts(inference_pb2.ResumeRequest(), max_retries=1, clock=clock)
    assert [attempts.pause_s(BROKEN), attempts.pause_s(BROKEN)] == [0.1, None]


def test_pauses_grow_up_to_a_bound(clock: Clock) -> None:
    attempts = Attempts(inference_pb2.ResumeRequest(), max_retries=0, patience_s=60.0, clock=clock)
    assert [attempts.pause_s(BROKEN) for _ in range(6)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_an_answer_is_whole_with_its_last_chunk(clock: Clock) -> None:
    attempts = attached(clock)
    attempts.got(last(0, [1]))
    assert attempts.whole


def test_what_a_gateway_says_is_told_from_what_grpc_says_of_a_connection() -> None:
    assert of_the_connection(NOBODY)
    assert not of_the_connection(said(NotServing("draining")))
    assert not of_the_connection(said(BadInput("a", "b")))
