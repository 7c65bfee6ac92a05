"""A probe: its question to a health port, and the answers that it takes."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from laps_sd.authority import make_certs
from protos import health
from protos.health import is_serving
from protos.serving import PUBLIC_MESSAGE_BYTES, Server
from protos.tls import Tls

SCRIPT = Path(health.__file__)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    """One under mutual TLS."""
    make_certs(tmp_path)
    mine = tmp_path / "scheduler"
    tls = Tls(ca=mine / "ca.crt", cert=mine / "tls.crt", key=mine / "tls.key")
    server = Server(["laps_sd.v1.Inference"], PUBLIC_MESSAGE_BYTES, tls.server_credentials())
    yield server
    await server.stop(0)


async def ask(port: int | None, service: str = "") -> bool:
    return await asyncio.to_thread(is_serving, f"127.0.0.1:{port}", service)


async def test_it_tells_life_and_readiness_apart_beside_a_port_that_asks_for_certificates(server: Server) -> None:
    secured = await server.start("127.0.0.1", 0)
    port = await server.start_health("127.0.0.1", 0)
    assert [await ask(port), await ask(port, "laps_sd.v1.Inference")] == [True, False]
    await server.set_ready(True)
    assert await ask(port, "laps_sd.v1.Inference")
    assert not await ask(port, "nobody.knows.It")
    assert not await ask(secured)


async def test_a_container_asks_without_any_package(server: Server) -> None:
    await server.start("127.0.0.1", 0)
    port = await server.start_health("127.0.0.1", 0)

    def status(*words: str) -> int:
        return subprocess.run([sys.executable, "-IS", str(SCRIPT), *words], capture_output=True, timeout=60).returncode

    assert await asyncio.to_thread(status, f"127.0.0.1:{port}") == 0
    assert await asyncio.to_thread(status, f"127.0.0.1:{port}", "laps_sd.v1.Inference") == 1
    assert await asyncio.to_thread(status) == 1


async def test_after_its_end_nobody_is_well(server: Server) -> None:
    await server.start("127.0.0.1", 0)
    port = await server.start_health("127.0.0.1", 0)
    await server.stop(0)
    assert not await ask(port)


async def test_a_port_that_is_taken_is_told(server: Server) -> None:
    taken = await server.start("127.0.0.1", 0)
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{taken}"):
        await server.start_health("127.0.0.1", taken)


def test_one_that_says_nothing_is_not_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not is_serving(f"127.0.0.1:{silent.getsockname()[1]}")


@pytest.mark.parametrize("target", ["127.0.0.1", "127.0.0.1:x", "no host:1", ""])
def test_what_is_no_address_is_not_well(target: str) -> None:
    assert not is_serving(target)
