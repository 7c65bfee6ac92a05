"""The proxy between the services of the chaos suite: it passes everything on, and breaks it as it is told."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import pytest

from tests.chaos.proxy import HOST, Proxy, Streams, Trouble
from tests.waiting import WAIT_S

SECOND = b"second"


@asynccontextmanager
async def echo_behind_a_proxy() -> AsyncIterator[tuple[Proxy, Streams]]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(1 << 16):
            writer.write(piece)
        writer.close()

    server = await asyncio.start_server(echo, HOST, 0)
    port = server.sockets[0].getsockname()[1]
    proxy = Proxy(lambda: asyncio.open_connection(HOST, port))
    await proxy.start()
    reader, writer = await asyncio.open_connection(HOST, proxy.port)
    try:
        async with asyncio.timeout(WAIT_S):
            yield proxy, (reader, writer)
    finally:
        writer.close()
        proxy.stop()
        server.close()


async def test_what_passes_is_whole_however_slowly() -> None:
    whole = bytes(range(256)) * 1000
    async with echo_behind_a_proxy() as (proxy, (reader, writer)):
        with proxy.troubled(Trouble(delay_s=0.001)), proxy.troubled(Trouble(bytes_per_s=4e6)):
            writer.write(whole)
            assert await reader.readexactly(len(whole)) == whole


@pytest.mark.parametrize("direction", ["up", "down"])
async def test_a_hole_swallows_until_it_is_over(direction: str) -> None:
    holds = asyncio.Event()

    class Change(asyncio.Event):
        async def wait(self) -> Literal[True]:
            holds.set()
            return await super().wait()

    async with echo_behind_a_proxy() as (proxy, (reader, writer)):
        proxy._change = Change()
        with proxy.troubled(Trouble(holds=frozenset({direction}))):
            writer.write(SECOND)
            answer = asyncio.ensure_future(reader.readexactly(len(SECOND)))
            await holds.wait()
            assert not answer.done()
        assert await answer == SECOND


async def test_a_cut_connection_breaks_and_the_next_one_works() -> None:
    async with echo_behind_a_proxy() as (proxy, (reader, writer)):
        writer.write(SECOND)
        await reader.readexactly(len(SECOND))
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            await reader.read()
        reader, writer = await asyncio.open_connection(HOST, proxy.port)
        writer.write(SECOND)
        assert await reader.readexactly(len(SECOND)) == SECOND
        writer.close()


async def test_nobody_behind_it_is_a_broken_connection() -> None:
    nobody = Proxy(lambda: asyncio.open_connection(HOST, 1))
    await nobody.start()
    reader, writer = await asyncio.open_connection(HOST, nobody.port)
    with pytest.raises(ConnectionResetError):
        await reader.read()
    writer.close()
    nobody.stop()
