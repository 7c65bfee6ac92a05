"""What tests of clients share."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from laps_sd.authority import make_certs
from tests.waiting import WAIT_S


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make_certs(folder)
    return folder


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The one that the environment names."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(WAIT_S)
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{listening.getsockname()[1]}")
        monkeypatch.delenv("no_proxy", raising=False)
        yield listening


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of the search for the cause of a failed connection has time: the servers of these tests are threads of
    the same, busy process."""
    monkeypatch.setattr("laps_sd.client.causes.PROBE_S", WAIT_S / 4)
