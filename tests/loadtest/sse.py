"""A small HTTP server that streams scripted events, as OpenAI-compatible servers do. No assertions live here."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.waiting import WAIT_S

DONE = "[DONE]"


@dataclass
class Answers:
    """What it answers to every POST, and what it was asked. Text in `events` goes out as it is, the rest as JSON."""

    events: Sequence[Any] = ()
    status: int = 200
    model: str = "tiny"
    asked: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)  # path, headers, body
    connections: int = 0
    pause: asyncio.Event | None = None  # waited for before the last event
    serving: set[asyncio.Future[Any]] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.serving.add(asyncio.ensure_future(self._serve(reader, writer)))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            while line := (await reader.readline()).decode():
                method, path, _ = line.split()
                headers = {}
                while (header := (await reader.readline()).decode().strip()) != "":
                    name, _, value = header.partition(": ")
                    headers[name.lower()] = value
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if method == "GET":
                    self._whole(writer, 200, {"data": [{"id": self.model, "max_model_len": 99}]})
                    continue
                self.asked.append((path, headers, json.loads(body)))
                if self.status != 200:
                    self._whole(writer, self.status, {"error": "too many requests"})
                    continue
                await self._stream(writer)

    def _whole(self, writer: asyncio.StreamWriter, status: int, what: Any) -> None:
        body = json.dumps(what).encode()
        writer.write(b"HTTP/1.1 %d x\r\ncontent-type: application/json\r\n" % status)
        writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for i, event in enumerate(self.events):
            if self.pause is not None and i == len(self.events) - 1:
                await self.pause.wait()
            text = event if isinstance(event, str) else json.dumps(event)
            data = f"data: {text}\n\n".encode()
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()


@asynccontextmanager
async def serving(answers: Answers) -> AsyncIterator[str]:
    """Its URL."""
    server = await asyncio.start_server(answers.serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*answers.serving)  # who asked has hung up


def text(said: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": said, "finish_reason": finish}]}


def delta(finish: str | None = None, **said: str) -> dict[str, Any]:
    return {"choices": [{"delta": said, "finish_reason": finish}]}


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}
