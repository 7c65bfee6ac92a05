"""The page's paths: its files, which are open to all and hold no figure; and what they ask for, where each looks at who
asks. Nothing is computed here."""

import json
from functools import partial
from importlib.resources import files
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.access import caller
from gateway.front import Front
from gateway.http.access import route
from gateway.http.errors import BodyTooLarge
from gateway.keys import Keys, Right
from gateway.page.feed import VIEW_S, FrameFeed
from gateway.page.frames import comparison
from gateway.page.prompts import Samples, answered, generation, read_prompt
from gateway.page.sessions import ENDED, PATH, Sessions, same_origin, set_cookie
from gateway.page.streaming import Streaming
from protos.errors import BadInput, QueueFull, RequestError
from protos.v1 import inference_pb2

POLICY = "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
LOGIN_BYTES = 4096  # of its body
_SCRIPTS = ("page.js", "parts.js", "requests.js", "policies.js", "prompt.js", "words.js")
FILES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
    **dict.fromkeys(_SCRIPTS, "text/javascript; charset=utf-8"),
}


def routes(front: Front, keys: Keys | None) -> list[Route]:
    """`keys`: those that the gateway asks for; None: it asks for none."""
    pages = Pages(front, Sessions(keys))
    return [
        *(route("/" if name == "index.html" else f"{PATH}/{name}", _file(name), right=None) for name in FILES),
        # Each looks itself at who asks: a browser has the page's cookie and no key.
        route(f"{PATH}/session", pages.session, right=None),
        route(f"{PATH}/login", pages.login, right=None, methods=["POST"]),
        route(f"{PATH}/logout", pages.logout, right=None, methods=["POST"]),
        route(f"{PATH}/feed", pages.feed, right=None),
        route(f"{PATH}/policies", pages.policies, right=None),
        route(f"{PATH}/prompt", pages.prompt, right=None, methods=["POST"]),
        route(f"{PATH}/samples", pages.samples, right=None, methods=["POST"]),
    ]


def _file(name: str) -> Any:
    content = files("gateway.page").joinpath("static", name).read_bytes()

    async def serve(request: Request) -> Response:
        return Response(content, media_type=FILES[name], headers=HEADERS)

    return serve


class Pages:
    def __init__(self, front: Front, sessions: Sessions) -> None:
        self._front, self._sessions = front, sessions
        self._feed, self._samples = FrameFeed(front), Samples(front)

    async def session(self, request: Request) -> Response:
        """Whether this browser may see the page, and if not whether a key would help."""
        try:
            visitor = self._sessions.visitor(request)
        except RequestError as error:
            return JSONResponse({"open": False, "keyed": self._sessions.keyed, "problem": error.message})
        try:
            self._feed.look_for_room()
        except QueueFull as error:  # a browser is not told why a feed is refused
            return JSONResponse({"open": False, "keyed": False, "problem": error.message})
        answer = JSONResponse({"open": True, "keyed": self._sessions.keyed})
        answer.raw_headers += set_cookie(request, visitor.cookie)
        return answer

    async def login(self, request: Request) -> Response:
        """The body is `{"key": KEY}`. Strangers may send it, uncounted: so no long one is kept. Raises BodyTooLarge."""
        same_origin(request)
        body = b""
        try:
            async for part in request.stream():
                body += part
                if len(body) > LOGIN_BYTES:
                    raise BodyTooLarge(LOGIN_BYTES)
            cookie = self._sessions.login(str(json.loads(body)["key"]))
        except (ValueError, KeyError, TypeError, RecursionError, ClientDisconnect):
            raise BadInput("key", "missing") from None
        answer = JSONResponse({"open": True})
        answer.raw_headers += set_cookie(request, cookie)
        return answer

    async def logout(self, request: Request) -> Response:
        same_origin(request)
        answer = JSONResponse({"open": False})
        answer.raw_headers += set_cookie(request, ENDED)
        return answer

    async def feed(self, request: Request) -> Any:
        visitor = self._sessions.visitor(request)
        return Streaming(self._feed.view, "text/event-stream", set_cookie(request, visitor.cookie), VIEW_S)

    async def policies(self, request: Request) -> Response:
        self._sessions.visitor(request)
        answer = await self._front.compare_policies(inference_pb2.ComparePoliciesRequest())
        return JSONResponse(comparison(answer), headers={"cache-control": "no-store"})

    async def prompt(self, request: Request) -> Any:
        same_origin(request)
        caller.set(self._sessions.visitor(request, Right.GENERATE).caller)
        asked = generation(self._front, *await read_prompt(request))
        return Streaming(partial(answered, self._front, asked), "application/x-ndjson")

    async def samples(self, request: Request) -> Response:
        same_origin(request)
        caller.set(self._sessions.visitor(request, Right.GENERATE).caller)
        return JSONResponse({"sent": self._samples.send()}, 202)
