"""Whole answers of an HTTP port, to clients that read them and to clients that do not."""

import asyncio
import random
import socket

import httpx2
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from protos import http_server
from protos.http_server import HttpServer
from tests.waiting import WAIT_S, until

ANSWER = random.Random(0).randbytes(64 << 20)  # more than the kernel takes for a client that does not read


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    await Response(ANSWER)(scope, receive, send)


@pytest.mark.parametrize("piece_bytes", [http_server.PIECE_BYTES, len(ANSWER)], ids=["within", "at its end"])
@pytest.mark.parametrize("head", [b"", b"connection: close\r\n"], ids=["kept alive", "closed"])
async def test_a_client_that_reads_nothing_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, head: bytes, piece_bytes: int
) -> None:
    monkeypatch.setattr(http_server, "PIECE_BYTES", piece_bytes)
    asked = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asked.set()
        await answer(scope, receive, send)

    server = HttpServer(app, "127.0.0.1", 0, stalled_s=0.1)
    await server.start()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n")
        await asyncio.wait_for(asked.wait(), WAIT_S)

        async def gone() -> bool:
            return not server._state.connections

        await until(gone)
    await server.stop(0)


async def test_a_client_that_reads_gets_the_whole_answer() -> None:
    server = HttpServer(answer, "127.0.0.1", 0)
    await server.start()
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=WAIT_S) as client:
        for _ in range(2):  # over one connection
            assert (await client.get("/")).content == ANSWER
        assert (await client.head("/")).headers["content-length"] == str(len(ANSWER))
    await server.stop(0)
