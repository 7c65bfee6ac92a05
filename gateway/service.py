"""The gRPC door: the calls of laps_sd.v1.Inference. What they do with a request is in front.py."""

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import structlog

from gateway.front import Front
from gateway.stream import Stream
from protos.errors import REQUEST_ID_KEY, Failed, RequestError
from protos.logs import trace
from protos.serving import abort
from protos.v1 import inference_pb2, inference_pb2_grpc, status_pb2

Request = TypeVar("Request")
Response = TypeVar("Response")
Context: TypeAlias = Any  # grpc.aio.ServicerContext: grpc is not typed
Self = TypeVar("Self")
Handler = Callable[[Self, Request, Context], Awaitable[Response]]


def answers_errors(handler: Handler[Self, Request, Response]) -> Handler[Self, Request, Response]:
    """Where an exception of a handler becomes a gRPC status."""

    @functools.wraps(handler)
    async def call(self: Self, request: Request, context: Context) -> Response:
        try:
            return await handler(self, request, context)
        except RequestError as error:
            answer = error
        except Exception as error:
            structlog.get_logger().error("unexpected", call=handler.__name__, trace=trace(error))
            answer = Failed("internal error")
        await abort(context, answer)
        raise AssertionError("abort raises")

    return call


class Inference(inference_pb2_grpc.InferenceServicer):
    def __init__(self, front: Front) -> None:
        self._front = front

    # Handlers are coroutines that write, not async generators: grpc.aio cancels a coroutine as soon as its client hangs
    # up, even while a write waits for a slow reader.
    @answers_errors
    async def Generate(  # type: ignore[override] # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        async with self._front.generate(request, context.time_remaining()) as stream:
            await _relay(stream, context)

    @answers_errors
    async def Resume(  # type: ignore[override] # noqa: N802
        self, request: inference_pb2.ResumeRequest, context: Context
    ) -> None:
        async with self._front.resume(request.request_id, request.offset, context.time_remaining()) as stream:
            await _relay(stream, context)

    @answers_errors
    async def Cancel(  # noqa: N802
        self, request: inference_pb2.CancelRequest, context: Context
    ) -> inference_pb2.CancelResponse:
        await self._front.cancel(request.request_id)
        return inference_pb2.CancelResponse()

    @answers_errors
    async def GetRequest(  # noqa: N802
        self, request: inference_pb2.GetRequestRequest, context: Context
    ) -> inference_pb2.GetRequestResponse:
        return await self._front.get_request(request)

    @answers_errors
    async def ListRequests(  # noqa: N802
        self, request: inference_pb2.ListRequestsRequest, context: Context
    ) -> inference_pb2.ListRequestsResponse:
        return await self._front.list_requests(request)

    @answers_errors
    async def Stats(self, request: inference_pb2.StatsRequest, context: Context) -> status_pb2.StatsResponse:  # noqa: N802
        return await self._front.stats(request)

    @answers_errors
    async def DrainWorker(  # noqa: N802
        self, request: inference_pb2.DrainWorkerRequest, context: Context
    ) -> inference_pb2.DrainWorkerResponse:
        return await self._front.drain_worker(request)

    @answers_errors
    async def ComparePolicies(  # noqa: N802
        self, request: inference_pb2.ComparePoliciesRequest, context: Context
    ) -> inference_pb2.ComparePoliciesResponse:
        return await self._front.compare_policies(request)


async def _relay(stream: Stream, context: Context) -> None:
    await stream.accepted()
    await context.send_initial_metadata(((REQUEST_ID_KEY, stream.request_id),))
    async for chunk in stream:
        async with stream.writing(chunk):
            await context.write(chunk.message())
