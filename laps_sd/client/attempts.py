"""Whether a call that failed is made again, when, and what is asked then. No connection lives here and no clock runs:
both clients, the synchronous and the asynchronous one, ask the same object.

A call is made again when that cannot run a request twice: the server has refused it and says when to come back; nothing
was reached; the request is detached, so that it is there under its id; or the call only asks."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from laps_sd.client.reading import chunk
from laps_sd.client.results import Chunk
from laps_sd.client.wire import DETAILS_KEY, Lost, NotServing, RequestError, from_call, inference_pb2, types_pb2

RESUME_S = 30.0  # a broken stream of a detached request is given up after so long without a chunk
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 1.0  # between attempts, where the server names no time
MOST_S = 365 * 86_400.0  # of a deadline: gRPC fails at once where its clock cannot count so far, and at infinity
MOST_TOLD_S = 60.0  # a server that names a longer time is not waited for
# A server or a proxy that stops ends calls with CANCELLED when it cannot end them in order.
_BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
_CONNECTION = (*_BROKEN, grpc.StatusCode.DEADLINE_EXCEEDED)
# How gRPC begins what it says then; the last two of names, in newer and in older versions.
_NEVER_SENT = ("failed to connect", "errors resolving", "DNS resolution failed")
_REFUSED_STREAM = "RST_STREAM with error code 7"  # of HTTP/2 (RFC 9113, 8.7): the server has done nothing with the call


@dataclass(slots=True)
class Attempts:
    """The attempts at one call. `request` is what the next one asks.

    max_retries: of refusals that may be repeated, and of rounds in which no server was reached.
    patience_s: a broken call is repeated, however often, until so many seconds have passed since it first broke. An
    attempt that lives longer counts as an answer, or a proxy would end a long wait: only the deadline bounds those.
    again: whether it may be repeated although the server may have had it.
    """

    request: Any
    max_retries: int
    timeout_s: float | None = None
    patience_s: float = 0.0
    again: bool = True
    clock: Callable[[], float] = time.monotonic
    whole: bool = False  # the last chunk is there
    begun: bool = False  # a chunk is there
    _retries: int = 0
    _unreached: int = 0  # targets in a row, of a round
    _pause_s: float = FIRST_PAUSE_S
    _deadline: float | None = field(init=False, default=None)
    _broken_at: float | None = None  # None: it has not, since the last chunk
    _again_at: float = 0.0  # when the next attempt begins

    def __post_init__(self) -> None:
        self._deadline = None if self.timeout_s is None else self.clock() + self.timeout_s

    @property
    def remaining_s(self) -> float | None:
        """For the next attempt; None: no deadline."""
        return None if self._deadline is None else min(max(0.0, self._deadline - self.clock()), MOST_S)

    def got(self, message: inference_pb2.GenerateResponse) -> Chunk:
        """A chunk has come. From now on the stream is continued behind it."""
        self.request = inference_pb2.ResumeRequest(
            request_id=message.request_id, offset=message.offset + len(message.token_ids)
        )
        self._broken_at, self._pause_s = None, FIRST_PAUSE_S
        self.begun, self.whole = True, message.HasField("final")
        return chunk(message)

    def ended(self) -> None:
        """The stream has ended in order. Raises Lost if the answer has not."""
        if not self.whole:
            where = f"after token {self.request.offset} of {self.request.request_id}, " if self.begun else ""
            raise Lost(f"the stream ended {where}before the answer did")

    def pause_s(self, error: grpc.RpcError, targets: int = 1) -> float | None:
        """An attempt has failed: seconds until the next one, at the next of the `targets`. None: there is none."""
        told_s = request_error(error).retry_after_ms / 1e3
        pause_s = max(told_s, self._pause_s) * random.uniform(1.0, 1.2)  # so that not all come back at once
        now, broken = self.clock(), error.code() in _BROKEN
        if told_s > MOST_TOLD_S or (self._deadline is not None and now + pause_s >= self._deadline):
            return None
        if broken and (self._broken_at is None or now > self._again_at + self.patience_s):
            self._broken_at = now  # also where an attempt has lived so long: it was no answer to the break before
        self._again_at = now + pause_s
        if self._broken_at is None or not broken or self._again_at > self._broken_at + self.patience_s:
            refused = (self.again or not self.begun) and told_s > 0
            said = error.details() or ""
            never_sent = not self.begun and broken and (said.startswith(_NEVER_SENT) or _REFUSED_STREAM in said)
            self._unreached = (self._unreached + 1) % targets if never_sent else 0
            if self._unreached:  # the others have not been asked yet
                return pause_s
            if self._retries >= self.max_retries or not (refused or never_sent or (broken and self.again)):
                return None
            self._retries += 1
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        return pause_s


def generating(
    request: inference_pb2.GenerateRequest, max_retries: int, timeout_s: float | None, new_id: str
) -> Attempts:
    """Of a generation; a detached one is sent again under its id, which is `new_id` if the caller chose none."""
    detached = request.on_disconnect == types_pb2.ON_DISCONNECT_DETACH
    if detached and not request.request_id:
        request.request_id = new_id
    return Attempts(request, max_retries, timeout_s, RESUME_S if detached else 0.0, again=detached)


def request_error(error: grpc.RpcError) -> RequestError:
    """The RequestError that a status stands for."""
    if error.code() is grpc.StatusCode.CANCELLED:
        return NotServing("the connection was given up by the server")
    return from_call(error)


def of_the_connection(error: grpc.RpcError) -> bool:
    """Whether gRPC itself made the status: no service was reached, or the connection broke."""
    return error.code() in _CONNECTION and not any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ())
