"""Puts the HTTP port's app together: the doors' routes, what surrounds each call, and what every service answers. What
a door does lives with that door."""

import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from email.utils import formatdate
from importlib.metadata import version

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from gateway.front import Front
from gateway.http import errors
from gateway.http.access import HttpAccess, route
from gateway.http.bodies import Bounded
from gateway.keys import Right
from protos.errors import REQUEST_ID_KEY, Failed, RequestError
from protos.idempotence import REQUEST_ID
from protos.logs import trace

VERSION = version("laps-sd")


def make_app(
    routes: Iterable[Route],
    access: HttpAccess,
    *,
    most_body_bytes: int,
    cors_origins: Sequence[str] = (),
    answers: Counter[str] | None = None,
) -> Starlette:
    """`cors_origins`: pages of these origins may ask from a browser; none: only pages of this port itself. `answers`:
    counts those of the API, by status."""
    surroundings = [Middleware(RequestId)]
    if answers is not None:
        surroundings.append(Middleware(Counted, answers=answers))
    if cors_origins:
        surroundings.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(cors_origins),
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                allow_private_network=True,  # a page of the internet that was named, and a gateway in one's own network
                expose_headers=[REQUEST_ID_KEY, *errors.RETRY],
            )
        )
    app = Starlette(
        routes=list(routes),
        middleware=[*surroundings, Middleware(Unexpected), Middleware(Bounded, most_bytes=most_body_bytes)],
        exception_handlers={HTTPException: _no_such_thing, RequestError: _request_error},
    )
    app.router.redirect_slashes = False
    app.state.access = access
    return app


def common_routes(front: Front, registry: CollectorRegistry, *, metrics_right: Right | None) -> list[Route]:
    """The paths that balancers and monitoring ask of every service."""

    async def health(request: Request) -> Response:
        """Ready: a new request would be served."""
        return Response(status_code=200 if front.ready else 503)

    async def live(request: Request) -> Response:
        return Response()

    async def version(request: Request) -> Response:
        return JSONResponse({"version": VERSION})

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return [
        route("/health", health, right=None),
        route("/live", live, right=None),
        route("/version", version, right=None),
        route("/metrics", metrics, right=metrics_right),
    ]


class Counted:
    """Counts the API's answers by status, those too that no route has seen. Probes and scrapes would be the most."""

    def __init__(self, app: ASGIApp, answers: Counter[str]) -> None:
        self._app, self._answers = app, answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._answers[str(message["status"])] += 1
            await send(message)

        api = scope["type"] == "http" and scope["path"].startswith("/v1/")
        await self._app(scope, receive, counted if api else send)


class RequestId:
    """Every answer has the header `x-request-id`: the call's own, where that is valid, which the logs have too. It
    names no request, since proxies add one to every call. Without it the header is what a handler says, or an id that
    is drawn here; a handler finds that in `request.state.request_id`. And every answer has `date`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_KEY, "")
        own = given if REQUEST_ID.fullmatch(given) else ""
        drawn = scope.setdefault("state", {})["request_id"] = uuid.uuid4().hex

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if own:
                    headers[REQUEST_ID_KEY] = own
                headers.setdefault(REQUEST_ID_KEY, drawn)
                headers.setdefault("date", formatdate(usegmt=True))  # RFC 9110 6.6.1; nothing below adds it
            await send(message)

        with bound_contextvars(**({"x_request_id": own} if own else {})):
            await self._app(scope, receive, named)


class Unexpected:
    """An error that nobody foresaw is logged, and where nothing is sent yet it is an answer like any other. Starlette's
    own place for that is outside of what gives answers their headers, and the log its ids."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def sent(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, sent)
        except Exception as error:
            structlog.get_logger().error("unexpected", path=scope["path"][:200], trace=trace(error))
            if begun:
                raise
            await errors.response(Failed("internal error"))(scope, receive, send)


async def _request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return errors.response(error)


async def _no_such_thing(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method[:20]} {request.url.path[:200]}"
    if error.status_code == 405:
        answer = errors.plain(405, f"{what}: this path does not take that method")
        answer.headers.update(error.headers or {})
        return answer
    if request.url.path.startswith("/v2/"):  # so told as that protocol's clients read it
        return JSONResponse(
            {"error": "the Open Inference Protocol is served by gRPC only, on the gateway's gRPC port"}, 404
        )
    nearest = "/v1/" + "/".join(part for part in request.url.path.split("/") if part not in ("", "v1"))
    hint = f"; there is {nearest}" if any(getattr(each, "path", "") == nearest for each in request.app.routes) else ""
    return errors.plain(error.status_code, f"{what}: there is no such path{hint}")
