"""Which call needs which right: decided before a message is read, for every service of the port. Knows no requests."""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import grpc

from gateway.keys import ANYBODY, Caller, Keys, Right
from protos.errors import Forbidden, RequestError
from protos.serving import abort

caller: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)  # of the call that is being answered

_INFERENCE = "/laps_sd.v1.Inference/"
# What a port serves, and the right that each call needs.
OWN = {_INFERENCE + name: Right.GENERATE for name in ("Generate", "Resume", "Cancel", "GetRequest")}
ADMIN = {_INFERENCE + name: Right.ADMIN for name in ("Stats", "Cancel", "GetRequest")}
_OPEN = ("/grpc.health.v1.", "/grpc.reflection.")  # no secrets: the interface is in the repository


class Access(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc is not typed
    """Admits to `calls` alone, so that a new call is served nowhere until somebody says who may make it."""

    def __init__(self, keys: Keys | None, calls: Mapping[str, Right]) -> None:
        """Without keys whoever reaches the port may make all of its calls."""
        self._keys, self._calls = keys, calls

    async def intercept_service(self, continuation, details):  # type: ignore[no-untyped-def]
        if not details.method.startswith(_OPEN):
            try:
                caller.set(self._admit(details))
            except RequestError as error:
                return _refusal(error)
        return await continuation(details)

    def _admit(self, details: Any) -> Caller:
        """Raises Unauthenticated, Forbidden."""
        who = ANYBODY
        if self._keys is not None:
            who = self._keys.caller(dict(details.invocation_metadata).get("authorization", ""))
        if (needed := self._calls.get(details.method)) is None:
            raise Forbidden("this call is not served on this port; the gateway's admin port may serve it")
        if needed not in who.rights:
            raise Forbidden(f"authorization: this call needs the right {needed}, which the key does not have")
        return who


def _refusal(error: RequestError) -> grpc.RpcMethodHandler:
    """Answers a call of whatever kind without reading a message of it."""

    async def refuse(requests: Any, context: Any) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
