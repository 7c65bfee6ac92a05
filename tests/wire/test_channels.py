"""Connections to peers that are far, or busy."""

import asyncio
from contextlib import suppress

import grpc
import pytest

from protos.serving import channel, dialled

SLOW_S = 0.3  # until the peer's first words arrive: a round trip or two around the world, or a busy machine


async def test_a_peer_that_is_slow_to_answer_is_connected_to() -> None:
    server, answers = grpc.aio.server(), asyncio.Event()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", port)
        await answers.wait()
        with suppress(OSError):
            await asyncio.gather(copy(reader, to_server), copy(from_server, writer))
        to_server.close()
        writer.close()

    far = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with far, channel(f"127.0.0.1:{far.sockets[0].getsockname()[1]}") as link:
        assert link.get_state(try_to_connect=True) is grpc.ChannelConnectivity.IDLE
        await link.wait_for_state_change(grpc.ChannelConnectivity.IDLE)
        with pytest.raises(TimeoutError):  # it goes on trying
            await asyncio.wait_for(link.wait_for_state_change(grpc.ChannelConnectivity.CONNECTING), SLOW_S)
        answers.set()
        await link.wait_for_state_change(grpc.ChannelConnectivity.CONNECTING)
        assert link.get_state() is grpc.ChannelConnectivity.READY
    await server.stop(0)


async def test_no_link_of_services_goes_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with channel(f"127.0.0.1:{port}") as link:
        await dialled(link)
        assert link.get_state() is grpc.ChannelConnectivity.READY
    await server.stop(0)


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
