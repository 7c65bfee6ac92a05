"""Those who ask. HTTP clients that cost next to nothing: each asks for one streamed answer over a connection of its
own, and counts events. They read what real clients read, over real sockets. And one that needs no gateway: it asks the
stub of a scheduler itself. Nothing is measured here but times of arrival."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc

from laps_sd.loadtest.drivers import raise_file_limit
from protos.link.v1 import common_pb2, gateway_link_pb2_grpc
from protos.link.v1 import gateway_link_pb2 as pb
from protos.serving import channel

EVENT = b"data: {"
END = b"data: ["  # of [DONE]; as long as the other


class Reader(asyncio.Protocol):
    """One client. `events`: events so far; `ttft_s`: from the request sent to its first event; `problem`: why there is
    no whole answer."""

    def __init__(self, max_tokens: int) -> None:
        self.events, self.ttft_s, self.problem = 0, 0.0, ""
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._max_tokens, self._sent_s, self._left = max_tokens, 0.0, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def ask(self) -> None:
        body = json.dumps(
            {
                "model": "stub",
                "messages": [{"role": "user", "content": "Why is the sky blue?"}],
                "max_tokens": self._max_tokens,
                "stream": True,
            }
        ).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(body)}\r\n\r\n"
        self._sent_s = time.perf_counter()
        self._transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        if not self.events:
            self._begin(data)
        seen = self._left + data
        self.events += seen.count(EVENT)
        self._left = seen[1 - len(EVENT) :]  # an event may begin in one piece and go on in the next
        if END in seen:
            self._close("")

    def _begin(self, data: bytes) -> None:
        if EVENT in data:
            self.ttft_s = time.perf_counter() - self._sent_s
            self._set_begun()
        elif data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200"):
            self._close(data[:300].decode(errors="replace"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._close(str(exc or "the connection was closed before the answer was whole"))

    def _close(self, problem: str) -> None:
        if not self.over.done():
            self.problem = problem
            self.over.set_result(None)
            self._set_begun()
            self._transport.close()

    def _set_begun(self) -> None:
        if not self.begun.done():
            self.begun.set_result(None)

    def hang_up(self) -> None:
        self._close("")


async def connect(port: int, max_tokens: int) -> Reader:
    """Connected, and not yet asking."""
    _, reader = await asyncio.get_running_loop().create_connection(lambda: Reader(max_tokens), "127.0.0.1", port)
    return reader


async def open_streams(port: int, count: int, max_tokens: int) -> list[Reader]:
    """So many streams, each with its first event."""
    raise_file_limit()
    readers = []
    for start in range(0, count, 50):
        some = [await connect(port, max_tokens) for _ in range(min(50, count - start))]
        for reader in some:
            reader.ask()
        await asyncio.gather(*(reader.begun for reader in some))
        readers += some
    return readers


@asynccontextmanager
async def straight(target: str) -> AsyncIterator[Callable[[], Awaitable[float]]]:
    """The block may ask the scheduler at `target` for one token, over a link of its own: seconds from the request sent
    to the token. One at a time. Raises ConnectionError."""
    lost = ConnectionError("the stub of a scheduler hung up")
    async with channel(target) as connection:
        link = gateway_link_pb2_grpc.GatewayLinkStub(connection).Link()

        async def ask() -> float:
            submit = pb.Submit(request_id=uuid.uuid4().hex, prompt=[1], limits=common_pb2.Limits(max_tokens=1))
            sent_s = time.perf_counter()
            try:
                await link.write(pb.FromGateway(submit=submit))
                while isinstance(message := await link.read(), pb.ToGateway):
                    if message.deltas:
                        return time.perf_counter() - sent_s
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:  # a read fails so, or a write
                raise lost from error
            raise lost

        try:
            yield ask
        finally:
            link.cancel()
