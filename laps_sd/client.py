"""A small asyncio client of `laps_sd.v1.Inference`: streams, whole answers, status and figures. It continues a request
after a broken connection only with DETACH, and never submits one twice otherwise. No command line lives here."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from laps_sd.completion import Collector, Completion
from protos.errors import RETRY_AFTER_KEY, BadInput, NotServing, RequestError, from_code
from protos.serving import PUBLIC_MESSAGE_BYTES, channel
from protos.settings import is_loopback
from protos.v1 import inference_pb2, inference_pb2_grpc, status_pb2, types_pb2

SERVICE = "laps_sd.v1.Inference"
UNARY_TIMEOUT_S = 10.0
HTTPS = "https://"
RESUME_S = 30.0  # a broken stream of a detached request is given up after so long without a chunk
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 1.0
# A server or a proxy that stops ends calls with CANCELLED when it cannot end them in order.
_BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class Client:
    """Usage: `async with Client("127.0.0.1:50051") as client: print((await client.complete(prompt="Hi")).text)`.

    Every call raises a RequestError (protos/errors.py). `params` are the fields of GenerateRequest by name; enums are
    given as their numbers or names.
    """

    def __init__(self, target: str, *, api_key: str | None = None, ca: Path | None = None) -> None:
        """`target`: HOST:PORT, or several gateways of one service with commas between; when one is lost the next is
        asked. The connection is TLS if `ca` is given, a PEM file of the authority that signed the server's certificate,
        or if `target` starts with https://, where the public authorities count. Raises BadInput for a key that would
        travel to another machine unencrypted."""
        self.target = target.removeprefix(HTTPS)
        self._targets = self.target.split(",")
        self._at = 0  # index of the target that is asked
        self._ca, self._tls = ca, ca is not None or target.startswith(HTTPS)
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise BadInput("api_key", "must be printable ASCII")
        far = [one for one in self._targets if not is_loopback(one.rpartition(":")[0])]
        if api_key is not None and not self._tls and far:
            raise BadInput("api_key", f"{far[0]} is another machine: use https:// or name its ca")
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key is not None else ()

    async def __aenter__(self) -> Self:
        """Raises OSError if `ca` cannot be read."""
        trusted = self._ca.read_bytes() if self._ca else None
        credentials = grpc.ssl_channel_credentials(trusted) if self._tls else None
        self._channels = [channel(one, credentials, PUBLIC_MESSAGE_BYTES) for one in self._targets]
        return self

    async def __aexit__(self, *error: object) -> None:
        for each in self._channels:
            await each.close()

    @property
    def _channel(self) -> grpc.aio.Channel:
        return self._channels[self._at % len(self._channels)]

    @property
    def _stub(self) -> inference_pb2_grpc.InferenceStub:
        return inference_pb2_grpc.InferenceStub(self._channel)

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        timeout_s: float | None = None,
        **params: Any,
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Chunks as they come. Closing the iterator hangs up, which does what `on_disconnect` says.

        With DETACH the stream survives a lost connection or gateway: the submission is sent again under its id, which
        is drawn here if none was given, and the stream continues where it broke off. It is given up after RESUME_S.
        """
        if messages is not None:
            params["chat"] = {"messages": [dict(message) for message in messages]}
        if prompt is not None:
            params["prompt"] = prompt
        try:
            request = inference_pb2.GenerateRequest(**params)
        except ValueError as error:  # a number that does not fit its field, or text that is not Unicode
            raise BadInput("request", str(error)) from error
        detached = request.on_disconnect == types_pb2.ON_DISCONNECT_DETACH
        if detached and not request.request_id:
            request.request_id = uuid.uuid4().hex
        async for chunk in self._stream(request, timeout_s, patience_s=RESUME_S if detached else 0.0):
            yield chunk

    async def resume(
        self, request_id: str, offset: int = 0, *, timeout_s: float | None = None
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """The chunks of a request from output token `offset` on. A broken stream is continued, as with DETACH."""
        request = inference_pb2.ResumeRequest(request_id=request_id, offset=offset)
        async for chunk in self._stream(request, timeout_s, patience_s=RESUME_S):
            yield chunk

    async def _stream(
        self,
        request: inference_pb2.GenerateRequest | inference_pb2.ResumeRequest,
        timeout_s: float | None,
        patience_s: float,
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """`patience_s`: a broken stream is given up after so many seconds without a chunk."""
        clock = asyncio.get_running_loop().time
        deadline = None if timeout_s is None else clock() + timeout_s
        give_up, pause_s = clock() + patience_s, FIRST_PAUSE_S
        whole = False
        while True:
            at, stub = self._at, self._stub
            ask = stub.Resume if isinstance(request, inference_pb2.ResumeRequest) else stub.Generate
            remaining_s = None if deadline is None else max(0.0, deadline - clock())
            call = ask(request, timeout=remaining_s, metadata=self._metadata)
            try:
                async for chunk in call:
                    request = inference_pb2.ResumeRequest(
                        request_id=chunk.request_id, offset=chunk.offset + len(chunk.token_ids)
                    )
                    give_up, pause_s = clock() + patience_s, FIRST_PAUSE_S
                    whole = chunk.HasField("final")
                    yield chunk
                return
            except grpc.aio.AioRpcError as error:
                if whole:
                    return
                if error.code() not in _BROKEN or clock() + pause_s > give_up:
                    raise request_error(error) from error
            finally:
                call.cancel()
            self._at = at + 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def complete(self, prompt: str | None = None, **params: Any) -> Completion:
        """The whole answer of `generate`, which takes the same arguments."""
        collector = Collector()
        async for chunk in self.generate(prompt, **params):
            collector.add(chunk)
        return collector.completion()

    async def cancel(self, request_id: str) -> None:
        """End a request at once."""
        with _request_errors():
            await self._ask(self._stub.Cancel, inference_pb2.CancelRequest(request_id=request_id))

    async def status(self, request_id: str) -> status_pb2.RequestStatus:
        """The state of one request: why does it wait, how far is it?"""
        with _request_errors():
            request = inference_pb2.GetRequestRequest(request_id=request_id)
            answer: inference_pb2.GetRequestResponse = await self._ask(self._stub.GetRequest, request)
            return answer.request

    async def list_requests(self, page_size: int = 0, page_token: str = "") -> inference_pb2.ListRequestsResponse:
        """One page of the live requests, those that run first. `page_token`: `next_page_token` of the page before."""
        with _request_errors():
            request = inference_pb2.ListRequestsRequest(page_size=page_size, page_token=page_token)
            page: inference_pb2.ListRequestsResponse = await self._ask(self._stub.ListRequests, request)
            return page

    async def stats(self) -> status_pb2.StatsResponse:
        """Figures of the whole service."""
        with _request_errors():
            stats: status_pb2.StatsResponse = await self._ask(self._stub.Stats, inference_pb2.StatsRequest())
            return stats

    async def _ask(self, call: Any, request: Any) -> Any:
        return await call(request, timeout=UNARY_TIMEOUT_S, metadata=self._metadata)

    async def ready(self, timeout_s: float) -> None:
        """Returns once a warmed worker serves; raises NotServing after `timeout_s` seconds."""
        watch = health_pb2_grpc.HealthStub(self._channel).Watch(
            health_pb2.HealthCheckRequest(service=SERVICE), timeout=timeout_s, wait_for_ready=True
        )
        try:
            async for answer in watch:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.aio.AioRpcError as error:
            raise NotServing(f"{self.target} is not ready: {error.details()}") from error
        finally:
            watch.cancel()
        raise NotServing(f"{self.target} ended before it was ready")


@contextmanager
def _request_errors() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise request_error(error) from error


def request_error(error: grpc.aio.AioRpcError) -> RequestError:
    """The RequestError that a status stands for."""
    trailers = {str(key): str(value) for key, value in error.trailing_metadata() or ()}
    if error.code() is grpc.StatusCode.CANCELLED:
        return NotServing("the connection was given up by the server")
    retry_after_ms = int(trailers.get(RETRY_AFTER_KEY, 0))
    return from_code(error.code().value[0], error.details() or error.code().name, retry_after_ms)
