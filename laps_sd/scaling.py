"""Workers that are added to a running stack and taken from it. `laps-sd scale` asks for it over a socket of this
machine, which only the stack's own user may open."""

import asyncio
import json
import os
import socket
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from platformdirs import user_runtime_path

from laps_sd.supervise import Child, Command, GaveUp

VERSION = 1  # of what is said over the socket: a line of JSON each way
ASK_TIMEOUT_S = 10.0
MOST = 256  # workers of one machine
PREFIX = "worker-"


class NotAsked(Exception):
    """No stack took the question; the message says why."""


class Running(Protocol):
    """A stack, as far as its workers are concerned."""

    children: list[Child]

    def child(self, command: Command) -> Child: ...


class Workers:
    """`tasks` keep the children running. `make`: the command of worker number so much, of how many. `most`: workers;
    None: any number. `changed` is called when there are others."""

    def __init__(
        self,
        stack: Running,
        tasks: asyncio.TaskGroup,
        make: Callable[[int, int], Command],
        *,
        most: int | None = None,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._stack, self._tasks, self._make, self._most, self._changed = stack, tasks, make, most, changed

    def scale(self, number: int) -> dict[str, list[str]]:
        """So many workers are to serve. Those with the highest numbers end, and drain before that. Returns at once: the
        names of workers that serve already, that start, and that end."""
        stack = self._stack
        stack.children[:] = [child for child in stack.children if not child.gone]
        workers = [child for child in stack.children if child.name.startswith(PREFIX)]
        serving = sorted((child for child in workers if not child.stopping), key=lambda child: _number(child.name))
        ending = serving[number:]
        for child in ending:
            child.begin_to_stop()
        taken = {child.name for child in workers}
        free = (index for index in range(len(taken) + number) if f"{PREFIX}{index}" not in taken)
        starting = [stack.child(self._make(next(free), number)) for _ in range(number - len(serving))]
        for child in starting:
            keeping = self._tasks.create_task(_keep(child), name=child.name)
            keeping.add_done_callback(lambda _: self._changed())
            stack.children.append(child)
        self._changed()
        told = {"serving": serving[:number], "starting": starting, "ending": ending}
        return {word: [child.name for child in children] for word, children in told.items()}

    @asynccontextmanager
    async def listening(self, grpc_port: int, emit: Callable[[bytes], object]) -> AsyncIterator[None]:
        """Take questions while the block runs. Where the socket cannot be made a line goes to `emit`."""
        try:
            path = socket_path(grpc_port)
            _make_room(path)
            server = await asyncio.start_unix_server(self._answer, path)
        except OSError as error:
            entry = {"service": "up", "event": "cannot_be_scaled", "level": "warning", "words": str(error)}
            emit(json.dumps(entry).encode() + b"\n")
            yield
            return
        try:
            yield
        finally:
            server.close()
            path.unlink(missing_ok=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, TimeoutError, ValueError, RecursionError):
            async with asyncio.timeout(ASK_TIMEOUT_S):
                asked = json.loads(await reader.readline())
                writer.write(json.dumps(self._take(asked)).encode() + b"\n")
                await writer.drain()
        writer.close()

    def _take(self, asked: Any) -> dict[str, Any]:
        number = asked.get("workers") if isinstance(asked, dict) else None
        if not isinstance(number, int) or asked.get("version") != VERSION:
            return {"problem": "`laps-sd up` and `laps-sd scale` are of different versions"}
        if number < 1:
            return {"problem": "at least one worker; to end all of them end `laps-sd up`"}
        if self._most is not None and number > self._most:
            return {"problem": f"at most {self._most}: --devices and --stages go with one worker"}
        if number > MOST:
            return {"problem": f"at most {MOST} workers"}
        return self.scale(number)


def _make_room(path: Path) -> None:
    """A folder for the socket. Raises OSError, also if others may open what is there."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = path.parent.stat()
    if about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise OSError(f"{path.parent} is open to others; its mode must be 700")
    path.unlink(missing_ok=True)  # of a stack that was killed: the port is ours now


async def _keep(child: Child) -> None:
    """A worker that was added and does not come up, or cannot even be started, ends nothing but itself."""
    try:
        await child.keep_running()
    except (GaveUp, OSError) as error:
        child.say("given_up", reason=str(error))


def _number(name: str) -> int:
    return int(name.removeprefix(PREFIX))


def socket_path(grpc_port: int) -> Path:
    """Of the stack whose gateway has this port."""
    with warnings.catch_warnings():  # of a folder that stands in where the system names none: `_make_room` checks it
        warnings.simplefilter("ignore", UserWarning)
        return user_runtime_path("laps-sd") / f"{grpc_port}.sock"


def ask(grpc_port: int, workers: int) -> dict[str, list[str]]:
    """As Workers.scale, of the stack of this machine with that port. Raises NotAsked."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ASK_TIMEOUT_S)
        try:
            connection.connect(str(socket_path(grpc_port)))
            connection.sendall(json.dumps({"version": VERSION, "workers": workers}).encode() + b"\n")
            answer: dict[str, Any] = json.loads(connection.makefile().readline())
        except (OSError, ValueError):
            raise NotAsked(f"no `laps-sd up` of yours with --grpc-port {grpc_port} runs on this machine") from None
    if problem := answer.get("problem"):
        raise NotAsked(str(problem))
    return answer
