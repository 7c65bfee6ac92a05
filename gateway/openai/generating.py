"""The work behind one body: its choices are generated at once, and told as one JSON object or as a stream of events. A
client that hangs up cancels them, streamed or not."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.chunk import Chunk
from gateway.front import Front
from gateway.http import errors
from gateway.openai import sse, token_bytes, tools
from gateway.openai.answer import Answer
from gateway.openai.choice import Choice
from gateway.openai.frames import Frames
from gateway.openai.request import Asked
from gateway.stream import Stream
from protos.errors import REQUEST_ID_KEY, BadInput, RequestError

MOST_SCORES = 1 << 18  # log-probabilities of an answer that is not streamed: each takes 200 bytes until it is whole


class Generating:
    """An ASGI response: the work is done while it is sent. Raises RequestError as long as nothing was sent."""

    def __init__(self, asked: Asked, streams: AbstractAsyncContextManager[list[Stream]]) -> None:
        """`streams`: of its choices, opened when the work begins."""
        self._asked, self._open = asked, streams
        self._started = time.monotonic()
        self._headers = {REQUEST_ID_KEY: asked.request_id}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with sse.while_connected(receive):
            if self._asked.stream:
                await self._streamed(scope, send)
            else:
                body = to_json(await self._whole())
                await Response(body, 200, self._headers, "application/json")(scope, receive, send)

    async def _whole(self) -> dict[str, object]:
        async with self._open as streams:
            answer = await self._answer(streams)
            await accepted(streams)
            scores = 0

            async def take(index: int, stream: Stream) -> None:
                nonlocal scores
                async for chunk in stream:
                    scores += sum(1 + len(each.top_tokens) for each in chunk.logprobs)
                    if scores > MOST_SCORES:
                        raise BadInput("logprobs", f"more than {MOST_SCORES} in an answer: stream it, or ask for fewer")
                    if chunk.prompt_token_ids:
                        await asyncio.to_thread(answer.choices[index].tell_prompt, chunk)
                    answer.choices[index].take(chunk)

            await _at_once(streams, take)
        return answer.whole()

    async def _streamed(self, scope: Scope, send: Send) -> None:
        out = sse.Events(scope, send, self._headers)
        try:
            async with self._open as streams:
                answer = await self._answer(streams)
                await accepted(streams)
                await self._relay(out, answer, streams)
                last = sse.event(answer.last_event()) if self._asked.include_usage else b""
            await out.write(last + sse.DONE, more=False)
        except RequestError as error:
            if not out.begun:
                raise
            await out.write(sse.event(errors.body(error)), more=False)

    async def _relay(self, out: sse.Events, answer: Answer, streams: Sequence[Stream]) -> None:
        asked, live = self._asked, len(streams)
        ids, frames = asked.detached and live == 1, [Frames(answer, index) for index in range(live)]
        opening = answer.opening(usage=asked.continuous_usage) if asked.chat and live > 1 else []

        def place(chunk: Chunk) -> int | None:
            """For a client that means to come back: where a resumed stream would go on."""
            return chunk.offset + len(chunk.token_ids) if ids else None

        def said(index: int, chunk: Chunk) -> bytes:
            nonlocal live, opening
            if not asked.continuous_usage and (frame := frames[index].frame(chunk, place(chunk))) is not None:
                return frame
            events, opening = opening + answer.events(index, chunk, usage=asked.continuous_usage), []
            live -= chunk.final is not None
            if not live and not asked.include_usage:
                events[-1] |= answer.end(usage=asked.continuous_usage)
            return b"".join(sse.event(each, place(chunk)) for each in events)

        async def relay(index: int, stream: Stream) -> None:
            await out.relay(stream, partial(said, index), answer.choices[index].tell_prompt)

        with out.kept_alive(ids=ids):
            await _at_once(streams, relay)

    async def _answer(self, streams: Sequence[Stream]) -> Answer:
        """In the time that the requests take to become durable: prompts of tokens become text in a thread."""
        asked, model = self._asked, streams[0].model
        echoes = [each if isinstance(each, str) else await asyncio.to_thread(model.decode, each) for each in asked.echo]
        choices = [
            Choice(
                index,
                stream.request_id,
                figures=stream.answer,
                chat=asked.chat,
                of=token_bytes.of_model(model),
                echo=echoes[index // asked.choices] if echoes else "",
                may=asked.may if asked.requests else tools.resumed(stream.structure),
                prompt_apart=asked.prompt_logprobs,
                marked=asked.chat and not asked.requests and tools.may_mark(stream.structure),
                had=stream.before,
            )
            for index, stream in enumerate(streams)
        ]
        return Answer(
            id=f"{'chatcmpl' if asked.chat else 'cmpl'}-{asked.request_id}",
            model=asked.model or model.name,
            chat=asked.chat,
            choices=choices,
            prompt_tokens=sum(stream.prompt_tokens for stream in streams[:: asked.choices]),
            created=int(time.time()),
            started=self._started if asked.requests else None,
        )


async def _at_once(streams: Sequence[Stream], work: Callable[[int, Stream], Coroutine[Any, Any, None]]) -> None:
    """Do it for all of them. Raises the first error, and stops the others."""
    if len(streams) == 1:
        await work(0, streams[0])
        return
    try:
        async with asyncio.TaskGroup() as tasks:
            for index, stream in enumerate(streams):
                tasks.create_task(work(index, stream))
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


@asynccontextmanager
async def generated(front: Front, asked: Asked) -> AsyncIterator[list[Stream]]:
    """The streams of all choices, each submitted. Raises RequestError, in the names of HTTP, in the block too."""
    if (answers := len(asked.requests)) > (most := front.most_at_once):  # it would be told to come back, for ever
        raise BadInput("n" if asked.chat else "prompt", f"{answers} answers; this gateway makes {most} at a time")
    try:
        async with AsyncExitStack() as stack:
            streams, encoded = list[Stream](), dict[str, list[int]]()
            for number, request in enumerate(asked.requests):
                if number % asked.choices == 0:  # the next prompt
                    encoded = {}
                if number:
                    await asyncio.sleep(0)  # for others to have their turns
                opened = front.generate(request, asked.timeout_s, None, asked.loosen, encoded)
                streams.append(await stack.enter_async_context(opened))
            yield streams
    except BadInput as error:
        raise asked.renamed(error) from None


@asynccontextmanager
async def resumed(front: Front, request_id: str, offset: int) -> AsyncIterator[list[Stream]]:
    """The stream of a request that was submitted before, through whatever door. Raises RequestError."""
    async with front.resume(request_id, offset) as stream:
        yield [stream]


async def accepted(streams: Sequence[Stream]) -> None:
    """Return once all are durable: what can be made without that is made before. Raises RequestError."""
    for stream in streams:
        await stream.accepted()
