"""A TCP port in front of a server: what passes is cut, delayed, throttled or swallowed. It knows no protocol."""

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import inf

from protos.serving import first_of

HOST = "127.0.0.1"
PIECE_BYTES = 1 << 14
CONNECT_S = 5.0

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True, slots=True, eq=False)
class Trouble:
    """What a network does to each piece. `holds`: directions (up: to the server) in which nothing moves until it is
    over; then all that waited comes, as TCP sends again what was lost."""

    delay_s: float = 0.0
    bytes_per_s: float = inf
    holds: frozenset[str] = frozenset()


class Proxy:
    def __init__(self, connect: Callable[[], Awaitable[Streams]]) -> None:
        """`connect`: to the server behind it."""
        self._connect = connect
        self._troubles: set[Trouble] = set()
        self._change = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, HOST, 0)
        self.port: int = self._server.sockets[0].getsockname()[1]

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def stop(self) -> None:
        self._server.close()
        self.cut()

    def cut(self) -> None:
        """Reset every connection there is."""
        for writer in self._writers:
            _reset(writer)

    @contextmanager
    def troubled(self, trouble: Trouble) -> Iterator[None]:
        """Several at once add up."""
        self._troubles.add(trouble)
        try:
            yield
        finally:
            self._troubles.discard(trouble)
            self._change.set()
            self._change = asyncio.Event()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        ends = {writer}
        try:
            async with asyncio.timeout(CONNECT_S):
                far_reader, far_writer = await self._connect()
            ends.add(far_writer)
            self._writers.add(far_writer)
            await first_of(lambda: self._pump("up", reader, far_writer), lambda: self._pump("down", far_reader, writer))
        except OSError:  # refused, reset, or too late
            for end in ends:
                _reset(end)
        finally:
            self._writers -= ends
            for end in ends:
                end.close()

    async def _pump(self, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            piece = await reader.read(PIECE_BYTES)
            while any(direction in trouble.holds for trouble in self._troubles):
                await self._change.wait()
            if not piece:
                return
            delay_s = sum(trouble.delay_s for trouble in self._troubles)
            slowest = min((trouble.bytes_per_s for trouble in self._troubles), default=inf)
            await asyncio.sleep(delay_s + len(piece) / slowest)
            writer.write(piece)
            await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Not an orderly end: what is still on its way is lost, and the peer's next read fails."""
    with suppress(OSError):  # it is closed already
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
