"""Workers added to a running stack and taken from it, by whoever may open its socket."""

import asyncio
import os
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from laps_sd import scaling
from laps_sd.cli import app
from laps_sd.scaling import NotAsked, Workers, ask, socket_path
from laps_sd.supervise import Child, Command
from tests.waiting import WAIT_S, until

PORT = 50_051
SLEEPS = "import time; time.sleep(600)"


class Stack:
    def __init__(self) -> None:
        self.children = [self.child(Command("redis", [])), *(self.child(sleeper(i, 2)) for i in range(2))]

    def child(self, command: Command) -> Child:
        return Child(command, lambda line: None)

    @property
    def running(self) -> list[str]:
        return [child.name for child in self.children if child.pid is not None and not child.stopping]


def sleeper(index: int, of: int) -> Command:
    return Command(f"worker-{index}", [sys.executable, "-c", SLEEPS])


@asynccontextmanager
async def scaled(most: int | None = None) -> AsyncIterator[tuple[Stack, Workers]]:
    """A stack of two workers that run."""
    stack = Stack()
    async with asyncio.TaskGroup() as tasks:
        for child in stack.children[1:]:
            tasks.create_task(child.keep_running())
        yield stack, Workers(stack, tasks, sleeper, most=most)
        await asyncio.gather(*(child.stop() for child in stack.children[1:]))


@pytest.fixture(autouse=True)
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "run"
    monkeypatch.setattr(scaling, "user_runtime_path", lambda name: folder)
    return folder


async def test_workers_are_added_and_those_with_the_highest_numbers_end() -> None:
    async with scaled() as (stack, workers):
        assert workers.scale(3) == {"serving": ["worker-0", "worker-1"], "starting": ["worker-2"], "ending": []}
        await until(lambda: all_run(stack, "worker-0", "worker-1", "worker-2"))
        assert workers.scale(1)["ending"] == ["worker-1", "worker-2"]
        assert workers.scale(2)["starting"] == ["worker-3"]  # the names of the others are not free yet
        await until(lambda: all_run(stack, "worker-0", "worker-3"))


async def all_run(stack: Stack, *names: str) -> bool:
    return stack.running == list(names)


async def test_a_worker_that_left_is_counted_no_more() -> None:
    async with scaled() as (stack, workers):
        await until(lambda: all_run(stack, "worker-0", "worker-1"))
        await stack.children[1].stop()
        assert workers.scale(2) == {"serving": ["worker-1"], "starting": ["worker-0"], "ending": []}


async def test_a_worker_that_cannot_even_be_started_ends_nothing_else() -> None:
    lines: list[bytes] = []
    refused = Command("worker-2", [sys.executable, "x" * (4 << 20)])  # by the system: too long
    async with scaled() as (stack, workers):
        stack.child = lambda command: Child(refused, lines.append)  # type: ignore[method-assign]
        workers.scale(3)
        await until(lambda: all_run(stack, "worker-0", "worker-1"))
        await until(lambda: all_gone(stack.children[-1]))
    assert b"given_up" in lines[-1]


async def all_gone(child: Child) -> bool:
    return child.gone


async def test_so_many_workers_as_no_machine_has_are_not_started() -> None:
    async with scaled() as (stack, workers), workers.listening(PORT, lambda line: None):
        with pytest.raises(NotAsked, match="at most 256 workers"):
            await asyncio.to_thread(ask, PORT, 257)
        assert len(stack.running) <= 2


async def test_whoever_may_open_the_socket_is_answered(sockets: Path) -> None:
    async with scaled(most=2) as (_, workers), workers.listening(PORT, lambda line: None):
        assert stat.S_IMODE(os.stat(sockets).st_mode) == 0o700
        assert (await asyncio.to_thread(ask, PORT, 2))["serving"] == ["worker-0", "worker-1"]
        for number, problem in ((0, "at least one worker"), (3, "--devices and --stages go with one worker")):
            with pytest.raises(NotAsked, match=problem):
                await asyncio.to_thread(ask, PORT, number)
        said = await asyncio.to_thread(CliRunner().invoke, app, ["scale", "1"])
        assert said.output == "serving: worker-0\nending: worker-1\n"
    assert not socket_path(PORT).exists()


async def test_a_socket_that_others_could_open_is_not_made(sockets: Path) -> None:
    os.mkdir(sockets)
    os.chmod(sockets, 0o777)
    lines: list[bytes] = []
    async with scaled() as (_, workers), workers.listening(PORT, lines.append):
        pass
    assert b"is open to others" in lines[0]


async def test_where_there_is_no_place_for_a_socket_the_stack_runs_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nowhere(name: str) -> Path:
        raise PermissionError("runtime directory is owned by another user")

    monkeypatch.setattr(scaling, "user_runtime_path", nowhere)
    lines: list[bytes] = []
    async with scaled() as (_, workers), workers.listening(PORT, lines.append):
        pass
    assert b"cannot_be_scaled" in lines[0]


def test_without_a_stack_it_says_so_and_nothing_else() -> None:
    """Also where the system names no folder for sockets, as in a container."""
    environment = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
    words = [sys.executable, "-m", "laps_sd", "scale", "2", "--grpc-port", "1"]
    said = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert said.returncode == 1
    assert said.stderr == "laps-sd: no `laps-sd up` of yours with --grpc-port 1 runs on this machine\n"
