"""Server-sent events: how an event is written, and one response made of them. It knows nothing of what they say."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Any

from pydantic_core import to_json
from starlette.types import Message, Receive, Scope, Send

from gateway.chunk import Chunk
from gateway.stream import Stream
from protos.http_server import BODY, Body

KEEP_ALIVE_S = 10.0
DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n"
# Characters that end no line of server-sent events, but do for clients that split text as Python's splitlines.
_LINE_ENDS = {end.encode(): f"\\u{ord(end):04x}".encode() for end in ("\x85", "\u2028", "\u2029")}
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # a proxy is to pass each event on at once
}


def event(data: Mapping[str, Any], id: int | None = None, kind: str = "") -> bytes:
    """With an id or a kind only where clients expect it: simple ones think that an event begins with `data: `."""
    said = json(data)
    name = b"" if id is None else b"id: %d\n" % id
    if kind:
        name += b"event: %s\n" % kind.encode()
    return name + b"data: " + said + b"\n\n"


def json(data: object) -> bytes:
    """JSON of one line, in whatever way lines are split. It has no infinity: a client's own number may be one."""
    said = to_json(data, inf_nan_mode="null")
    if not said.isascii():
        for raw, escaped in _LINE_ENDS.items():
            said = said.replace(raw, escaped)
    return said


class Events:
    """A response that begins with its first event, so that an error before it can still have a status of its own."""

    def __init__(self, scope: Scope, send: Send, headers: Mapping[str, str]) -> None:
        self.begun = False
        self._body: Body | None = scope.get("extensions", {}).get(BODY)
        self._headed = False  # the head is out
        self._loop = asyncio.get_running_loop()
        self._send = send
        self._headers = [(name.encode(), value.encode()) for name, value in (HEADERS | dict(headers)).items()]
        self._writing = asyncio.Lock()
        self._beat: asyncio.Task[None] | None = None  # the comment that is written
        self._written_s = self._loop.time()

    async def relay(
        self, stream: Stream, said: Callable[[Chunk], bytes], tell_prompt: Callable[[Chunk], None] | None = None
    ) -> None:
        """Write the events that `said` makes of each chunk, until the stream ends. Before that `tell_prompt` gets, in a
        thread, the one that tells of the prompt. Raises RequestError."""

        def write(chunk: Chunk) -> None:
            if events := said(chunk):
                assert self._body is not None
                self._body.write(events)
                self._written_s = self._loop.time()

        stream.write_at_once(self._ready, write)
        async for chunk in stream:
            if tell_prompt is not None and chunk.prompt_token_ids:
                await asyncio.to_thread(tell_prompt, chunk)
            if self._ready():
                write(chunk)
            else:
                async with stream.writing(chunk):
                    await self.write(said(chunk))

    def _ready(self) -> bool:
        """Whether events can be written without waiting."""
        return self._headed and self._body is not None and not self._body.waits

    async def write(self, events: bytes, *, more: bool = True) -> None:
        """Returns once the transport has taken them. `more`: these are not the last ones."""
        async with self._writing:
            said: Message = {"type": "http.response.body", "body": events, "more_body": more}
            if self.begun:
                await self._send(said)
            else:
                self.begun = True
                with self._body.in_one_piece() if more and self._body and not self._body.waits else nullcontext():
                    await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
                    await self._send(said)
            self._headed = True
            self._written_s = self._loop.time()

    @contextmanager
    def kept_alive(self, *, ids: bool = False) -> Iterator[None]:
        """While the block runs a comment is written whenever nothing else was, so that no proxy takes it for dead.
        `ids`: the events have ids."""
        # OpenAI's client, and httpx-sse, take each empty line behind an id for the end of an event. Without ids the
        # comment has one, for clients that expect `data: ` behind each.
        self._comment = _KEEP_ALIVE if ids else _KEEP_ALIVE + b"\n"
        self._looking = self._loop.call_at(self._written_s + KEEP_ALIVE_S, self._look)
        try:
            yield
        finally:
            self._looking.cancel()
            if self._beat is not None:
                self._beat.cancel()

    def _look(self) -> None:
        """Few streams are ever quiet for so long: a timer costs less than a task that waits."""
        due, now = self._written_s + KEEP_ALIVE_S, self._loop.time()
        if now >= due:
            if self._beat is None or self._beat.done():
                self._beat = self._loop.create_task(self.write(self._comment), name="keep-alive")
            due = now + KEEP_ALIVE_S
        self._looking = self._loop.call_at(due, self._look)


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """The block ends at once, and silently, when the client hangs up. The body of the request must have been read."""

    async def hung_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        limit.reschedule(0)

    waiting = asyncio.create_task(hung_up(), name="until hung up")
    try:
        async with asyncio.timeout(None) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
    finally:
        waiting.cancel()
