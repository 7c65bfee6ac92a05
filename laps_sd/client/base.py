"""What the synchronous and the asynchronous client have in common: the server, its connections, the messages of each
call, and what a failure is called. Nothing waits here."""

import os
import sys
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

import grpc
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from laps_sd.client.attempts import MOST_S, RESUME_S, Attempts, generating, of_the_connection, request_error
from laps_sd.client.causes import Cause, by_proxy, find_cause
from laps_sd.client.params import filled, generate_request
from laps_sd.client.server import find_server
from laps_sd.client.wire import (
    PUBLIC_MESSAGE_BYTES,
    BadInput,
    BeyondEnd,
    DeadlinePassed,
    Failed,
    Lost,
    NotServing,
    RequestError,
    inference_pb2,
    inference_pb2_grpc,
    is_loopback,
    options,
)

SERVICE = "laps_sd.v1.Inference"
SERVING = 1  # grpc.health.v1
CLOSED = "this client was closed"
UNARY_TIMEOUT_S = 10.0
MAX_RETRIES = 2


class Connection(NamedTuple):
    """To one target: gRPC's channel, and the calls of the interface on it."""

    channel: Any
    stub: Any


class Base:
    """See the two clients."""

    def __init__(
        self,
        server: str | None = None,
        *,
        api_key: str | None = None,
        ca: str | os.PathLike[str] | None = None,
        max_retries: int = MAX_RETRIES,
    ) -> None:
        """`server`: HOST:PORT, or several gateways of one service with commas between; when one is lost the next is
        asked. Default: LAPS_SD_SERVER in the environment, else 127.0.0.1:50051. The connection is TLS if `ca` is given,
        a PEM file of the authority that signed the server's certificate, or if `server` starts with https://, where the
        public authorities count. `ca`: default LAPS_SD_CA in the environment, `api_key`: LAPS_SD_API_KEY; "": none.
        `max_retries`: how often a call is made again that the server refused and said when to repeat, or that reached
        none of the gateways.

        Raises BadInput, also for a key that would travel to another machine unencrypted."""
        if isinstance(max_retries, bool) or not isinstance(max_retries, int) or max_retries < 0:
            raise BadInput("max_retries", f"must be a whole number from 0, not {max_retries!r}")
        self._server = find_server(server, api_key, ca)
        self._max_retries = max_retries
        self._at = 0  # index of the target that is asked

    @property
    def target(self) -> str:
        """HOST:PORT, or several with commas between."""
        return ",".join(self._server.targets)

    def _open(self, grpc_module: Any) -> list[Connection]:
        """One for each target, made by grpc or by grpc.aio. None connects before it is used."""
        credentials, made = self._server.credentials(), []
        for target in self._server.targets:
            settings = options(PUBLIC_MESSAGE_BYTES, by_proxy=not is_loopback(target.rpartition(":")[0]))
            if credentials is None:
                channel = grpc_module.insecure_channel(target, options=settings)
            else:
                channel = grpc_module.secure_channel(target, credentials, options=settings)
            made.append(Connection(channel, inference_pb2_grpc.InferenceStub(channel)))
        return made

    def _call(self, to: Connection, method: str, attempts: Attempts) -> Any:
        """Begins the call that is next."""
        return getattr(to.stub, method)(attempts.request, timeout=attempts.remaining_s, metadata=self._server.metadata)

    def _stream_call(self, to: Connection, attempts: Attempts) -> Any:
        resumes = isinstance(attempts.request, inference_pb2.ResumeRequest)
        return self._call(to, "Resume" if resumes else "Generate", attempts)

    def _health_call(self, to: Connection, attempts: Attempts) -> Any:
        """Watch of grpc.health.v1, whose two messages have one field each, a text and an enum: on the wire they are
        protobuf's own wrappers, so no package has to be installed for them."""
        watch = to.channel.unary_stream(
            "/grpc.health.v1.Health/Watch", StringValue.SerializeToString, Int32Value.FromString
        )
        return watch(StringValue(value=SERVICE), timeout=attempts.remaining_s, metadata=self._server.metadata)

    def _generating(
        self, call: str, prompt: str | None, timeout_s: float | None, params: Mapping[str, Any]
    ) -> Attempts:
        request = generate_request(call, prompt, params)
        return generating(request, self._max_retries, check_timeout(timeout_s), uuid.uuid4().hex)

    def _resuming(self, request_id: str, offset: int, timeout_s: float | None) -> Attempts:
        request = filled(inference_pb2.ResumeRequest(), request_id=request_id, offset=offset)
        return Attempts(request, self._max_retries, check_timeout(timeout_s), RESUME_S)

    def _asking(self, request: Any, *, again: bool = True, **fields: object) -> Attempts:
        """Of a call with one answer. `fields`: of its request. `again`: as in Attempts. Raises BadInput."""
        return Attempts(filled(request, **fields), self._max_retries, UNARY_TIMEOUT_S, again=again)

    def _waiting(self, timeout_s: float | None) -> Attempts:
        waited_s = check_timeout(MOST_S if timeout_s is None else timeout_s)
        return Attempts(None, sys.maxsize, waited_s)

    def _cause(self, attempts: Attempts, error: grpc.RpcError, at: int) -> Cause | None:
        """Why the connection to target number `at` failed, if that is what failed. Blocks: it tries to connect."""
        targets = self._server.targets
        target = targets[at % len(targets)]
        late = attempts.begun and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED  # it answered, and took too long
        if late or by_proxy(target) or not of_the_connection(error):
            return None
        return find_cause(self._server, target)

    def _failure(self, attempts: Attempts, error: grpc.RpcError, cause: Cause | None) -> RequestError:
        """What the caller is told."""
        told = request_error(error)
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return Failed(
                f"{self.target} has no such call: is it a gateway of LAPS-SD? `laps-sd up` prints where that is"
            )
        if (
            isinstance(told, BeyondEnd) and attempts.begun
        ):  # the offset is the client's own: these tokens were delivered
            return Lost(told.message)
        if cause is not None:
            return type(told)(cause.words)
        if isinstance(told, DeadlinePassed) and of_the_connection(error):
            return DeadlinePassed(f"{self.target} did not finish within the time given")
        return told

    def _wait_s(self, attempts: Attempts, error: grpc.RpcError, cause: Cause | None) -> float | None:
        """Seconds until a server that is not ready is asked again; None: it is of no use."""
        return None if cause is not None and not cause.passing else attempts.pause_s(error)

    def _not_ready(self, attempts: Attempts, error: grpc.RpcError, cause: Cause | None) -> NotServing:
        late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        waits = "it has no warmed worker, or its Redis refuses"
        why = cause.words if cause else waits if late else request_error(error).message
        bound = "" if attempts.timeout_s == MOST_S else f" (waited {attempts.timeout_s:g} s at most)"
        return NotServing(f"{self.target} is not ready: {why}{bound}")


def check_timeout(timeout_s: float | None) -> float | None:
    """Raises BadInput."""
    if timeout_s is None:
        return None
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s >= 0:
        raise BadInput("timeout_s", f"must be seconds, not {timeout_s!r:.100}")
    return min(timeout_s, MOST_S)
