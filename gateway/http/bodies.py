"""Bounds a request's body before anything parses it: its size, and how long it may take to come."""

import asyncio
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http import errors

BODY_S = 30.0  # a body that is not whole after so long is refused
LINGER_S = 5.0  # what still comes of a body that was refused is dropped for so long, and then the connection closed


class Bounded:
    def __init__(self, app: ASGIApp, most_bytes: int) -> None:
        self._app, self._most = app, most_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        send = _lingering(receive, send)
        if not length.isdecimal() or int(length) > self._most:
            await errors.response(errors.BodyTooLarge(self._most))(scope, receive, send)  # unread
            return
        received, whole = 0, False
        due = asyncio.get_running_loop().time() + BODY_S

        async def bounded() -> Message:
            """Raises BodyTooLarge, BodyTooSlow."""
            nonlocal received, whole
            if whole:  # what comes now is that the client has gone
                return await receive()
            try:
                async with asyncio.timeout_at(due):
                    message = await receive()
            except TimeoutError:
                raise errors.BodyTooSlow("body", f"not whole after {BODY_S:g} s") from None
            received += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if received > self._most:
                raise errors.BodyTooLarge(self._most)
            return message

        await self._app(scope, bounded, send)


def _lingering(receive: Receive, send: Send) -> Send:
    """Sends, but ends the answer to a body that is too long only when no more of it comes: many clients send all of it
    before they read, and a connection that is closed meanwhile is reset, so that they would never see the answer."""
    too_long = False

    async def sent(message: Message) -> None:
        nonlocal too_long
        too_long = too_long or message.get("status") == 413
        if too_long and message["type"] == "http.response.body":
            await send({**message, "more_body": True})
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    while (await receive()).get("more_body"):
                        pass
            message = {"type": "http.response.body"}
        await send(message)

    return sent
