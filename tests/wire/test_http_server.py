"""Whole answers of an HTTP port, to clients that read them and to clients that do not."""

import asyncio
import random
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from laps_sd.authority import make_certs
from protos import http_server
from protos.http_server import HttpServer
from protos.tls import Files
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


async def stream(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": ANSWER[: 1 << 20], "more_body": True})
    await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("reads", [True, False], ids=["slowly", "nothing"])
@pytest.mark.parametrize("tls", [False, True])
async def test_a_client_has_the_end_of_a_stream_as_long_as_it_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tls: bool, reads: bool
) -> None:
    """With TLS most of it lies where the server's transport does not count it. Whoever reads does so between two looks
    of the server's, however long that takes on a busy machine: its clock never gets there by itself."""
    stalled_s = WAIT_S if reads else 0.5
    monkeypatch.setattr(http_server, "PIECE_BYTES", 1024)
    watching: list[http_server._Unread] = []

    class Unread(http_server._Unread):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            watching.append(self)

    monkeypatch.setattr(http_server, "_Unread", Unread)
    context = None
    if tls:
        make_certs(tmp_path)
        own = tmp_path / "gateway"
        context = Files(None, own / "tls.crt", own / "tls.key").ssl_contexts(mutual=False)
    server = HttpServer(stream, "127.0.0.1", 0, tls_context=context, stalled_s=stalled_s)
    server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
    await server.start()
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(plain, ("127.0.0.1", server.port))
    trusting = None
    if tls:
        trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(
        sock=plain, ssl=trusting, server_hostname="localhost" if tls else None, limit=1024
    )
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    said, looks = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S), 0
    if reads:
        while not said.endswith(b"\r\n0\r\n\r\n"):
            more = await asyncio.wait_for(reader.read(4096), WAIT_S)
            assert more, len(said)
            said += more
            if len(said) > (looks + 1) * (100 << 10):
                for unread in watching:
                    if not unread._timer.cancelled():
                        unread._look()
                looks += 1
        assert watching
        assert looks > 2
        assert len(said) > 1 << 20
    else:

        async def gone() -> bool:
            return not server._state.connections

        await until(gone)
    writer.transport.abort()
    await server.stop(0)
