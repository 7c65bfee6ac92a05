"""Why a server cannot be reached, as far as a connection by hand can tell; and where none is tried."""

import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer

import pytest

from laps_sd import Client
from laps_sd.client import NotServing
from laps_sd.client.causes import Cause, by_proxy, find_cause
from laps_sd.client.server import find_server
from tests.waiting import WAIT_S


def _found(last_words: bytes, certs: Path) -> Cause | None:
    """The cause that is found where a server answers a TLS handshake with these bytes, and hangs up."""

    class Ends(BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            self.request.sendall(last_words)

    with ThreadingTCPServer(("127.0.0.1", 0), Ends) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        target = f"127.0.0.1:{server.server_address[1]}"
        return find_cause(find_server(target, None, certs / "gateway" / "ca.crt"), target)


@pytest.mark.parametrize(
    ("alert", "words"),
    [
        (40, "alert handshake failure"),
        (70, "ends the TLS handshake: tlsv1 alert protocol version"),
        (112, "ends the TLS handshake: tlsv1 unrecognized name"),
        (110, "ends the TLS handshake: tlsv1 unsupported extension"),
        (120, "speaks HTTP, not gRPC|handshake: unknown error"),  # no common protocol; older OpenSSL has no text of it
        (200, "ends the TLS handshake: unknown error"),  # nor any of this one
    ],
)
def test_a_server_that_ends_the_handshake_is_not_said_to_be_without_tls(alert: int, words: str, certs: Path) -> None:
    cause = _found(bytes([21, 3, 3, 0, 2, 2, alert]), certs)
    assert cause is not None
    assert re.search(words, cause.words)


@pytest.mark.parametrize("last_words", [b"", bytes([21, 3, 3, 0, 2, 1, 0])], ids=["nothing", "close_notify"])
def test_a_server_that_only_hangs_up_may_still_be_starting(last_words: bytes, certs: Path) -> None:
    """As a proxy with nothing behind it does."""
    assert _found(last_words, certs) is None


def test_a_proxy_is_asked_for_another_machine(proxy: socket.socket) -> None:
    with Client("far.invalid:50051") as client, ThreadPoolExecutor(1) as pool:
        asking = pool.submit(client.stats)
        connection, _ = proxy.accept()
        assert connection.recv(100).startswith(b"CONNECT far.invalid:50051 ")
        proxy.close()
        connection.close()
        error = asking.exception(WAIT_S)
    assert isinstance(error, NotServing)
    assert "no machine is known" not in str(error)  # here, where nobody has to know it


@pytest.mark.usefixtures("proxy")
def test_a_machine_that_needs_no_proxy_is_looked_for_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "localhost, .Here, 192.0.2.0/24, fd00::1")
    assert [by_proxy(at) for at in ("far.invalid:1", "192.0.3.1:1", "[fd00::2]:1")] == [True] * 3
    monkeypatch.setenv("https_proxy", "HTTP://127.0.0.1:3128")
    assert by_proxy("far.invalid:1")
    assert not any(by_proxy(at) for at in ("a.herE:1", "127.0.0.1:1", "192.0.2.7:1", "[fd00::1]:1"))


@pytest.mark.usefixtures("proxy")
@pytest.mark.parametrize("told", ["", "127.0.0.1:3128", "https://127.0.0.1:3128"])
def test_what_grpc_does_not_take_for_a_proxy_is_none(told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("grpc_proxy", told)
    assert not by_proxy("far.invalid:1")
