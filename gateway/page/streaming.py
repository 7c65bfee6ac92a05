"""An answer to a browser that is written as it comes. What is written is the business of others."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress

from starlette.types import Receive, Scope, Send

from protos.serving import first_of

STALLED_S = 30.0  # a browser that reads nothing for so long is dropped

Open = Callable[[], AbstractAsyncContextManager[AsyncIterator[str]]]


class Streaming:
    """`open` gives the parts, and hears when the browser has gone: its block is left early then. What it raises as it
    opens is answered like any error. The answer ends after `most_s` at the latest."""

    def __init__(
        self, open: Open, media_type: str, headers: Sequence[tuple[bytes, bytes]] = (), most_s: float | None = None
    ) -> None:
        self._open, self._most_s = open, most_s
        at_once = ((b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"))  # a proxy is to keep nothing back
        self._headers = [(b"content-type", media_type.encode()), *at_once, *headers]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "HEAD":
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            await send({"type": "http.response.body"})
            return
        await first_of(lambda: _gone(receive), lambda: self._answer(send))

    async def _answer(self, send: Send) -> None:
        async def write(text: str, *, more: bool = True) -> None:
            async with asyncio.timeout(STALLED_S):
                await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        async with self._open() as parts:
            await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            try:
                async with asyncio.timeout(self._most_s) as whole:
                    await _write_all(parts, write)
            except TimeoutError:
                if not whole.expired():
                    return  # it reads nothing, not even the end
        with suppress(TimeoutError):
            await write("", more=False)


async def _write_all(parts: AsyncIterator[str], write: Callable[[str], Awaitable[None]]) -> None:
    async for part in parts:
        await write(part)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
