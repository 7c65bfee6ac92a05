"""Who may make which call, and how many calls at a time. An interceptor decides it for every service of a port, before
a message is read. It knows nothing of requests."""

from collections.abc import AsyncIterator, Callable, Mapping, Set
from contextvars import ContextVar
from functools import partial
from typing import Any

import grpc

from gateway.config import RETRY_AFTER_MS
from gateway.keys import ANYBODY, Caller, Keys
from gateway.rights import Right
from gateway.shares import Shares
from gateway.tracing import incoming
from protos.errors import BadInput, Forbidden, QueueFull, RequestError
from protos.serving import abort
from protos.tracing import TRACEPARENT_KEY, traceparent

caller: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)  # of the call that is being answered

_INFERENCE = "/laps_sd.v1.Inference/"
_OIP = "/inference.GRPCInferenceService/"
_OWN_OR_ALL = ("Cancel", "GetRequest")  # for one's own requests with one right, for all tenants' with the other
_OF_MODELS = ("ModelInfer", "ModelStreamInfer", "ModelMetadata", "ModelConfig")
# The calls that a port serves, and the rights of which each needs one.
OWN = {
    **{_INFERENCE + name: {Right.GENERATE} for name in ("Generate", "Resume", *_OWN_OR_ALL)},
    **{_OIP + name: {Right.GENERATE} for name in _OF_MODELS},
}
ADMIN = {
    _INFERENCE + name: {Right.ADMIN}
    for name in ("Stats", "ListRequests", "ComparePolicies", "DrainWorker", *_OWN_OR_ALL)
}
ALL = OWN | ADMIN | {_INFERENCE + name: set(Right) for name in _OWN_OR_ALL}
# These need no key: they tell nothing secret.
_OPEN = (
    "/grpc.health.v1.",
    "/grpc.reflection.",
    *(_OIP + name for name in ("ServerLive", "ServerReady", "ServerMetadata", "ModelReady")),
)


class GrpcAccess(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc is not typed
    """Refuses every call that is not in `calls`. So a new method is served nowhere until it is listed with a right."""

    def __init__(self, keys: Keys | None, calls: Mapping[str, Set[Right]], most: int) -> None:
        """Without `keys` every caller may make all calls of the port. `most`: calls at a time, of all callers."""
        self._keys, self._calls = keys, calls
        self._shares = Shares(most, "calls", RETRY_AFTER_MS)

    async def intercept_service(self, continuation, details):  # type: ignore[no-untyped-def]
        who, admit = None, lambda: None
        if not details.method.startswith(_OPEN):
            try:
                who = self._caller(details)
                if details.method not in OWN and details.method not in ADMIN:  # without a key nobody learns that
                    return grpc.stream_stream_rpc_method_handler(_unknown)
                (admit := partial(self._admit, details))()
            except RequestError as error:
                return _refusal(error)
            incoming.set(traceparent(dict(details.invocation_metadata).get(TRACEPARENT_KEY)))
        handler = await continuation(details)
        return handler and self._counted(handler, who if self._keys else None, admit)

    def _counted(
        self, handler: grpc.RpcMethodHandler, who: Caller | None, admit: Callable[[], None]
    ) -> grpc.RpcMethodHandler:
        """Count a call of any kind from its beginning, since its message may never come. Callers with a key share by
        tenant, others by address. `admit` is asked again for each message: a stream may outlive its key."""

        async def admitted(requests: Any) -> AsyncIterator[Any]:
            async for request in requests:
                admit()
                yield request

        async def call(requests: Any, context: Any) -> None:
            try:
                with self._shares.place(f"tenant:{who.tenant}" if who else context.peer().rpartition(":")[0]):
                    await _answer(handler, admitted(requests), context)
            except QueueFull as error:
                await abort(context, error)

        return grpc.stream_stream_rpc_method_handler(call, handler.request_deserializer, handler.response_serializer)

    def _caller(self, details: Any) -> Caller:
        """Raises Unauthenticated."""
        if self._keys is None:
            return ANYBODY
        return self._keys.caller(dict(details.invocation_metadata).get("authorization", ""))

    def _admit(self, details: Any) -> None:
        """Raises Unauthenticated, Forbidden."""
        who = self._caller(details)
        if (needed := self._calls.get(details.method)) is None:
            raise Forbidden("this call is not served on this port; the gateway's admin port may serve it")
        if not needed & who.rights:
            rights = " or ".join(sorted(needed))
            raise Forbidden(f"authorization: this call needs the right {rights}, which the key does not have")
        caller.set(who)


async def _answer(handler: grpc.RpcMethodHandler, requests: Any, context: Any) -> None:
    if handler.request_streaming:
        await handler.stream_stream(requests, context)
    elif (request := await context.read()) is grpc.aio.EOF:
        await abort(context, BadInput("request", "the call ended without a message"))
    elif handler.response_streaming:
        await handler.unary_stream(request, context)
    else:
        await context.write(await handler.unary_unary(request, context))


async def _unknown(requests: Any, context: Any) -> None:
    """Answers a call that no port serves, such as Triton's statistics, with the status that clients look for."""
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this service has no such call")


def _refusal(error: RequestError) -> grpc.RpcMethodHandler:
    """A handler that refuses a call of any kind without reading a message of it."""

    async def refuse(requests: Any, context: Any) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
