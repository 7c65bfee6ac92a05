"""The work behind a body of the Responses API, told as one JSON object or as a stream of events."""

from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any

from starlette.responses import Response as HttpResponse
from starlette.types import Receive, Scope, Send

from gateway.chunk import Chunk
from gateway.http import errors
from gateway.openai import sse
from gateway.openai.request import Asked
from gateway.openai.response import Response
from gateway.openai.response_fields import Responses
from gateway.stream import Stream
from protos.errors import REQUEST_ID_KEY, RequestError


class Responding:
    """An ASGI response: the work is done while it is sent. Raises RequestError as long as nothing was sent."""

    def __init__(self, body: Responses, asked: Asked, streams: AbstractAsyncContextManager[list[Stream]]) -> None:
        """`streams`: the one stream of the answer, opened when the work begins."""
        self._body, self._asked, self._open = body, asked, streams
        self._headers = {REQUEST_ID_KEY: asked.request_id}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with sse.while_connected(receive):
            if self._body.stream:
                await self._streamed(scope, send)
            else:
                async with self._open as (stream,):
                    answer = self._answer(stream)
                    await stream.accepted()
                    async for chunk in stream:
                        answer.take(chunk)
                said = HttpResponse(sse.json(answer.whole()), 200, self._headers, "application/json")
                await said(scope, receive, send)

    async def _streamed(self, scope: Scope, send: Send) -> None:
        out, answer = sse.Events(scope, send, self._headers), None
        try:
            async with self._open as (stream,):
                answer = self._answer(stream)
                await stream.accepted()
                with out.kept_alive():
                    await out.relay(stream, partial(_said, answer))
            await out.write(b"", more=False)
        except RequestError as error:
            if answer is None or not out.begun:
                raise
            said = answer.failed(errors.body(error)["error"] | {"type": "error"})
            await out.write(_written(said), more=False)

    def _answer(self, stream: Stream) -> Response:
        return Response(self._body, self._asked.request_id, stream.prompt_tokens, self._asked.may)


def _said(answer: Response, chunk: Chunk) -> bytes:
    return _written(answer.events(chunk))


def _written(events: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(sse.event(each, kind=each["type"]) for each in events)
