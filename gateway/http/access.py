"""Who may ask for which path, and how many calls a caller may have at a time: the same keys and the same bounds as on
the gRPC port. Every route names the right that it needs, or says that it needs none."""

import re
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access import caller
from gateway.config import RETRY_AFTER_MS
from gateway.http import errors
from gateway.keys import ANYBODY, Caller, Keys, Right
from gateway.shares import Shares
from gateway.tracing import incoming
from protos.errors import Forbidden, RequestError
from protos.settings import is_loopback
from protos.tracing import TRACEPARENT_KEY, traceparent

_PORT = re.compile(r":[0-9]*\Z")


class HttpAccess:
    """Decides for one port."""

    def __init__(self, keys: Keys | None, most_calls: int, *, strangers: bool, origins: Sequence[str] = ()) -> None:
        """Without `keys` every caller may do all, but if `strangers` can reach the port nobody administers there
        without a key, and of pages in browsers only its own and those of `origins` ask. `most_calls`: at a time, of
        all callers."""
        self._keys, self._strangers, self._origins = keys, strangers, origins
        self.shares = Shares(most_calls, "calls", RETRY_AFTER_MS)

    def admit(self, headers: Headers, right: Right) -> Caller:
        """Raises Unauthenticated, Forbidden."""
        if self._keys is None and right is Right.ADMIN and self._strangers:
            raise Forbidden("strangers can reach this port: set --api-keys, and send a key with the right admin")
        if self._keys is None and not self._takes_page(headers):
            raise Forbidden("without keys pages of other origins may ask only if the setting cors_origins names theirs")
        who = ANYBODY if self._keys is None else self._keys.caller(headers.get("authorization", ""))
        if right not in who.rights:
            raise Forbidden(f"authorization: this path needs the right {right}, which the key does not have")
        return who

    def _takes_page(self, headers: Headers) -> bool:
        """Whether the page that sent this is the port's own, at a name of this machine: another name may be a foreign
        site's that leads here (DNS rebinding). Other programs tell no origin."""
        origin = headers.get("origin")
        if origin is None:
            return headers.get("sec-fetch-site", "none") in ("none", "same-origin")
        if "*" in self._origins or origin in self._origins:
            return True
        return origin in own_origins(headers) and is_loopback(host(headers))

    def sharer(self, who: Caller, scope: Scope) -> str:
        """Callers with a key share calls by tenant, others by address."""
        if self._keys is not None:
            return f"tenant:{who.tenant}"
        return str((scope.get("client") or ("",))[0])


def host(headers: Headers) -> str:
    """The name by which the client asks, without the port."""
    return _PORT.sub("", headers.get("host", ""))


def own_origins(headers: Headers) -> tuple[str, str]:
    """Of pages that come from here. A proxy may speak TLS with the browser."""
    where = headers.get("host", "")
    return f"http://{where}", f"https://{where}"


class Needs:
    """The middleware of one route. The app's state holds the `HttpAccess`."""

    def __init__(self, app: ASGIApp, right: Right) -> None:
        self._app, self._right = app, right

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        access: HttpAccess = scope["app"].state.access
        try:
            who = access.admit(Headers(scope=scope), self._right)
            with access.shares.place(access.sharer(who, scope)):
                caller.set(who)
                incoming.set(traceparent(Headers(scope=scope).get(TRACEPARENT_KEY)))
                await self._app(scope, receive, send)
        except RequestError as error:  # of this middleware: what the route itself raises was answered further in
            await errors.response(error)(scope, receive, send)


def route(path: str, endpoint: Any, *, right: Right | None, methods: Sequence[str] = ("GET",)) -> Route:
    """A route for callers with that right; None: for everybody, who then learns nothing secret."""
    needs = [] if right is None else [Middleware(Needs, right=right)]
    return Route(path, endpoint, methods=list(methods), middleware=needs)
