"""Who never comes back ends its process; who only takes long, warms up, waits, or was stopped for a while, does not."""

import asyncio
import sys
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import ValidationError

from tests.waiting import WAIT_S
from worker_service import watchdog
from worker_service.config import CommonSettings as Common
from worker_service.drafting.config import Settings as Drafter
from worker_service.watchdog import POLL_S, Task, Watchdog

PROGRAM = """
import asyncio, ctypes
from types import SimpleNamespace
from worker_service.watchdog import Watchdog

async def main():
    runner = SimpleNamespace(task=SimpleNamespace(expected_s=0.01))
    watching = asyncio.create_task(Watchdog(runner, step_timeout_s=0.2, warm_up_timeout_s=30).run())
    {work}

asyncio.run(main())
"""
# SIGTERM comes while the device hangs, and the service asks its parts to end again and again.
TOLD_TO_END = """
import asyncio, os, signal, threading
from types import SimpleNamespace
from worker_service.config import CommonSettings
from worker_service.runner import Runner
from worker_service.service import Loaded, serve

class Hangs:
    def bind_thread(self, threads):
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()

async def load():
    runner, model = Runner(Hangs(), 1, 0), SimpleNamespace(name="m")
    return Loaded(engine=runner._engine, runner=runner, model=model, context_tokens=int, max_draft=1, about={})

asyncio.run(serve(CommonSettings(model="/none", warm_up_timeout_s=1, _cli_parse_args=False), load))
"""
WAITS = "await asyncio.sleep(60)"
KEEPS_THE_INTERPRETER = "await asyncio.sleep(0.1); ctypes.PyDLL(None).pause()"
PROGRAMS = [PROGRAM.format(work=WAITS), PROGRAM.format(work=KEEPS_THE_INTERPRETER), TOLD_TO_END]


@pytest.mark.parametrize("program", PROGRAMS, ids=["waits", "keeps the interpreter", "told to end"])
async def test_a_step_that_does_not_end_ends_the_process(program: str) -> None:
    hangs = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(WAIT_S):
        try:
            _, errors = await hangs.communicate()
        finally:
            if hangs.returncode is None:
                hangs.kill()
    assert hangs.returncode == 1
    assert b"most recent call first" in errors  # where each thread is


class Ended(BaseException):
    """In place of the process."""


@dataclass
class Polls:
    """The watchdog's polls, without their time; a new task begins after each `every` of them."""

    runner: Any
    every: int = 1 << 30
    most: int = 100
    count: int = 0

    async def sleep(self, seconds: float) -> None:
        self.count += 1
        if self.count > self.most:
            raise asyncio.CancelledError
        if self.count % self.every == 0:
            self.runner.task = Task(0.0)


@dataclass
class Runner:
    task: Task | None


async def polls(monkeypatch: pytest.MonkeyPatch, task: Task | None, **options: int) -> int:
    """Until the process ends, or all of them."""

    def end(code: int) -> None:
        raise Ended

    runner, armed = Runner(task), list[float]()
    made = Polls(runner, **options)
    monkeypatch.setattr(watchdog.asyncio, "sleep", made.sleep)
    monkeypatch.setattr(watchdog.os, "_exit", end)
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback", lambda file: None)
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", lambda timeout, exit: armed.append(timeout))
    monkeypatch.setattr(watchdog.faulthandler, "cancel_dump_traceback_later", armed.clear)
    with pytest.raises((Ended, asyncio.CancelledError)):
        await Watchdog(runner, step_timeout_s=2, warm_up_timeout_s=6).run()  # type: ignore[arg-type]
    assert not armed  # its timer must not outlive it
    return made.count


async def test_a_watchdog_that_cannot_watch_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OverflowError("timeout value is too large")

    def end(code: int) -> None:
        raise Ended

    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", refuse)
    monkeypatch.setattr(watchdog.os, "_exit", end)
    with pytest.raises(Ended):
        await Watchdog(Runner(None), step_timeout_s=2, warm_up_timeout_s=6).run()


@pytest.mark.parametrize("settings", [Common, Drafter])
@pytest.mark.parametrize("name", ["step_timeout_s", "warm_up_timeout_s"])
@pytest.mark.parametrize("seconds", [1e10, float("inf")])
def test_times_that_no_timer_can_count_are_refused(settings: Any, name: str, seconds: float) -> None:
    with pytest.raises(ValidationError, match=name):
        settings(model="m", **{name: seconds}, _cli_parse_args=False)


@pytest.mark.parametrize(("expected_s", "limit_s"), [(0.0, 2), (0.1, 3), (None, 6)])
async def test_the_limit_follows_what_is_expected_and_is_counted_in_polls(
    monkeypatch: pytest.MonkeyPatch, expected_s: float | None, limit_s: float
) -> None:
    """Not by a clock: a process that was stopped for a while has not hung."""
    assert await polls(monkeypatch, Task(expected_s)) == pytest.approx(limit_s / POLL_S, abs=1)


@pytest.mark.parametrize(("task", "every"), [(Task(0.0), 9), (None, 1 << 30)])
async def test_who_gets_on_or_waits_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, task: Task | None, every: int
) -> None:
    assert await polls(monkeypatch, task, every=every) > 100
