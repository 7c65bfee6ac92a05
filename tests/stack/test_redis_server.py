"""A Redis server of our own: found in each of the ways, and its data still there after a restart."""

import asyncio
import errno
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from socket import create_server

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from laps_sd import redis_server
from laps_sd.options import Options
from laps_sd.ports import StackError
from laps_sd.redis_server import FINDERS, NoServer, check_reachable, find_server, own_redis, server_command
from laps_sd.supervise import Child
from tests.waiting import WAIT_S, until

FOUND = sorted({program for find in FINDERS if (program := find())})


@asynccontextmanager
async def served(program: str, data: Path, socket: Path) -> AsyncIterator[Redis]:
    child = Child(server_command(program, data, socket), lambda line: None)
    client = Redis(unix_socket_path=str(socket))

    async def answers() -> bool:
        try:
            return bool(await client.ping())
        except RedisError:
            return False

    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(child.keep_running())
        try:
            await until(answers)
            yield client
        finally:
            await client.aclose()
            await child.stop()


@pytest.fixture
def socket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s") / "r.sock"


@pytest.mark.parametrize("program", FOUND)
async def test_what_was_written_is_there_after_a_restart(program: str, tmp_path: Path, socket: Path) -> None:
    async with served(program, tmp_path, socket) as client:
        await client.set("queued", "request")
    async with served(program, tmp_path, socket) as client:
        assert await client.get("queued") == b"request"


def modes(folder: Path) -> list[int]:
    """Of all files in it."""
    return [path.stat().st_mode for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("program", FOUND)
async def test_no_other_user_reads_what_was_written(program: str, tmp_path: Path, socket: Path) -> None:
    async with served(program, tmp_path, socket) as client:
        await client.set("queued", "request")
        assert modes(tmp_path)
        assert not [mode for mode in modes(tmp_path) if mode & 0o077]


def test_a_new_folder_of_data_is_its_users_alone(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with own_redis(Options(data_dir=data), tmp_path):
        assert data.stat().st_mode & 0o777 == 0o700


def test_a_folder_of_data_that_others_could_read_is_closed(tmp_path: Path) -> None:
    (data := tmp_path / "redis").mkdir(mode=0o755)
    with own_redis(Options(grpc_port=0), tmp_path):
        assert data.stat().st_mode & 0o777 == 0o700


def test_the_package_is_enough_on_a_fresh_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert Path(find_server()).name == "valkey-server"


@pytest.mark.parametrize("name", ["redis-server", "valkey-server"])
def test_a_server_on_the_path_comes_first(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / name
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server() == str(program)


def test_no_server_at_all_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_server, "FINDERS", ())
    with pytest.raises(NoServer, match="install one, or use --redis"):
        find_server()


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:6379", "redis://127.0.0.1:1", "unix:///no/such.sock", "redis://[::1]:port", "redis://[::1",
        "redis+sentinel://127.0.0.1:1,127.0.0.1:2/main", "redis+sentinel://127.0.0.1:1", "rediss+sentinel://:1/main",
    ],
)  # fmt: skip
def test_a_redis_that_cannot_be_reached_is_refused_at_once(url: str) -> None:
    with pytest.raises(NoServer, match="Redis"):
        check_reachable(url)


def test_one_sentinel_that_answers_is_enough() -> None:
    with create_server(("127.0.0.1", 0)) as sentinel:
        check_reachable(f"redis+sentinel://127.0.0.1:1,127.0.0.1:{sentinel.getsockname()[1]}/main")


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://me:secret@127.0.0.1:1,127.0.0.1:1/main?sentinel_password=secret",
        "redis://me:secret@127.0.0.1:1/0",
        "unix://me@/no.sock?password=secret",
        "x://:secret@h",
        "redis://me:secret/1@h",
    ],
)
def test_what_is_said_of_a_url_holds_no_password(url: str) -> None:
    with pytest.raises(NoServer) as refused:
        check_reachable(url)
    assert "secret" not in str(refused.value)


def test_a_folder_that_cannot_be_locked_is_no_other_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(StackError, match="cannot be locked, No locks available"):  # noqa: SIM117
        with own_redis(Options(data_dir=tmp_path), tmp_path):
            pass
