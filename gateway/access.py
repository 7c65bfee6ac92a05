"""Which call needs which right: decided before a message is read, for every service of the port. Knows no requests."""

from contextvars import ContextVar
from typing import Any

import grpc

from gateway.keys import ANYBODY, Caller, Keys, Right
from protos.errors import Forbidden, RequestError
from protos.serving import abort

caller: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)  # of the call that is being answered

_OWN_REQUESTS = frozenset(f"/laps_sd.v1.Inference/{name}" for name in ("Generate", "Cancel", "GetRequest"))
_OPEN = ("/grpc.health.v1.", "/grpc.reflection.")  # no secrets: the interface is in the repository


class Access(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc is not typed
    """Whatever is in no list needs the right `admin`."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def intercept_service(self, continuation, details):  # type: ignore[no-untyped-def]
        if not details.method.startswith(_OPEN):
            try:
                caller.set(self._admit(details))
            except RequestError as error:
                return _refusal(error)
        return await continuation(details)

    def _admit(self, details: Any) -> Caller:
        """Raises Unauthenticated, Forbidden."""
        who = self._keys.caller(dict(details.invocation_metadata).get("authorization", ""))
        needed = Right.GENERATE if details.method in _OWN_REQUESTS else Right.ADMIN
        if needed not in who.rights:
            raise Forbidden(f"authorization: this call needs the right {needed}, which the key does not have")
        return who


def _refusal(error: RequestError) -> grpc.RpcMethodHandler:
    """Answers a call of whatever kind without reading a message of it."""

    async def refuse(requests: Any, context: Any) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
