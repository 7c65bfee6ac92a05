"""Children that are kept running: restarted, given up, stopped, and never left behind."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from laps_sd import supervise
from laps_sd.stack import emit_entry
from laps_sd.supervise import Child, Command, GaveUp
from tests import waiting

SLEEPS = "import time; print('up', flush=True); time.sleep(600)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}"


def child_of(program: str, stop_s: float = waiting.WAIT_S) -> tuple[Child, list[bytes]]:
    """A child that runs this Python program, and the lines that it prints."""
    lines: list[bytes] = []
    return Child(Command("small", [sys.executable, "-c", program], stop_s=stop_s), lines.append), lines


async def until(condition: Callable[[], bool]) -> None:
    async def holds() -> bool:
        return condition()

    await waiting.until(holds)


@asynccontextmanager
async def kept(child: Child) -> AsyncIterator[None]:
    async with asyncio.timeout(2 * waiting.WAIT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(child.keep_running())
        try:
            yield
        finally:
            await child.stop()


async def test_a_child_that_dies_is_started_again() -> None:
    child, lines = child_of(SLEEPS)
    async with kept(child):
        await until(lambda: lines.count(b"up\n") == 1)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        await until(lambda: lines.count(b"up\n") == 2)
        assert b'"child": "small", "code": -9' in lines[1]


async def test_a_child_is_started_again_although_a_child_of_its_own_lives_on() -> None:
    """As a scheduler's trainer does, at the lowest priority on a busy machine: it has the same output."""
    starts = "import subprocess, sys; print('up', subprocess.Popen(['sleep', '300']).pid, flush=True)"
    child, lines = child_of(starts)

    def started() -> list[int]:
        return [int(line.split()[1]) for line in lines if line.startswith(b"up")]

    async with kept(child):
        await until(lambda: len(started()) == 2)
    for pid in started():
        os.kill(pid, signal.SIGKILL)


async def test_a_line_without_end_is_told_in_pieces() -> None:
    child, lines = child_of("print('x' * (1 << 20), end='', flush=True); import time; time.sleep(600)")
    async with kept(child):
        await until(lambda: sum(map(len, lines)) >= 1 << 20)
        assert max(map(len, lines)) <= 2 * supervise.MOST_LINE_BYTES


async def test_no_end_of_a_pipe_is_left_open() -> None:
    child, _ = child_of(SLEEPS)
    before = psutil.Process().num_fds()
    for turns in range(6):  # of the event loop; then it is cancelled, which may be before it runs
        task = asyncio.create_task(child.keep_running())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    assert psutil.Process().num_fds() <= before


async def test_a_replaced_child_ends_and_runs_the_other_command() -> None:
    child, lines = child_of(SLEEPS)
    async with kept(child):
        await until(lambda: lines == [b"up\n"])
        child.replace(Command("small", [sys.executable, "-c", SLEEPS.replace("up", "other")]))
        await until(lambda: lines == [b"up\n", b"other\n"])  # and nothing tells of a death


async def test_a_child_that_is_killed_is_never_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "MAX_EARLY_DEATHS", 2)
    child, lines = child_of(SLEEPS)
    async with kept(child):
        for lives in range(1, 5):
            await until(lambda lives=lives: lines.count(b"up\n") == lives)
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)


async def test_a_child_that_never_comes_up_is_given_up_with_its_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "FIRST_BACKOFF_S", 0.0)
    child, lines = child_of("print('no such model'); raise SystemExit(3)")
    with pytest.raises(GaveUp, match=r"5 times, each in its first 30 s, with exit code 3\. (?s:.*)no such model"):
        await child.keep_running()
    assert lines.count(b"no such model\n") == supervise.MAX_EARLY_DEATHS


async def test_a_child_that_dies_while_it_loads_is_given_up_however_long_it_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervise, "FIRST_BACKOFF_S", 0.0)
    monkeypatch.setattr(supervise, "EARLY_S", 0.0)
    child = Child(Command("small", [sys.executable, "-c", "raise SystemExit(3)"], up=b"up"), lambda _: None)
    with pytest.raises(GaveUp, match="5 times, each before it had come up, with exit code 3"):
        await child.keep_running()


async def test_deaths_after_it_came_up_are_no_reason_to_give_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "FIRST_BACKOFF_S", 0.0)
    lines: list[bytes] = []
    child = Child(Command("small", [sys.executable, "-c", "print('up'); raise SystemExit(3)"], up=b"up"), lines.append)
    async with kept(child):
        await until(lambda: lines.count(b"up\n") > supervise.MAX_EARLY_DEATHS)


async def test_a_child_that_has_run_is_started_again_however_often_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory, or no room for a process: most likely just after a worker was killed for its memory."""
    monkeypatch.setattr(supervise, "FIRST_BACKOFF_S", 0.0)
    more = supervise.MAX_EARLY_DEATHS + 1
    pipes, failures = os.pipe, [OSError(errno.EMFILE, "Too many open files")] * more

    def pipe() -> tuple[int, int]:
        if failures:
            raise failures.pop()
        return pipes()

    child, lines = child_of(SLEEPS)
    async with kept(child):
        await until(lambda: lines.count(b"up\n") == 1)
        assert child.pid is not None
        with monkeypatch.context() as full:
            full.setattr(os, "pipe", pipe)
            os.kill(child.pid, signal.SIGKILL)
            await until(lambda: lines.count(b"up\n") == 2)
    assert len([line for line in lines if b'"child_not_started"' in line and b"Too many open files" in line]) == more


async def test_a_child_that_cannot_be_started_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "FIRST_BACKOFF_S", 0.0)

    async def no_process(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", no_process)
    child, lines = child_of(SLEEPS)
    with pytest.raises(GaveUp, match=r"small could not be started: .*temporarily unavailable"):
        await child.keep_running()
    assert (len(lines), child.gone) == (supervise.MAX_EARLY_DEATHS, True)


async def test_a_child_that_refuses_its_flags_is_not_tried_again() -> None:
    child, lines = child_of("print('bad flag'); raise SystemExit(2)")
    with pytest.raises(GaveUp, match="exit code 2"):
        await child.keep_running()
    assert lines.count(b"bad flag\n") == 1


async def test_a_stopped_child_is_told_by_sigterm() -> None:
    child, lines = child_of(
        "import os, signal\n"
        "def end(*_): os.write(1, b'drained\\n'), os._exit(0)\n"  # print, as it may come within the other one, raises
        "signal.signal(signal.SIGTERM, end); print('up', flush=True)\n"
        "while True: signal.pause()"
    )
    async with kept(child):
        await until(lambda: bool(lines))
    assert lines == [b"up\n", b"drained\n"]


async def test_a_child_deaf_to_sigterm_is_killed_after_its_time() -> None:
    child, lines = child_of(DEAF, stop_s=0.1)
    async with kept(child):
        await until(lambda: bool(lines))
        pid = child.pid
    assert pid is not None
    assert not psutil.pid_exists(pid)


async def test_cancelling_cuts_patience_short() -> None:
    child, lines = child_of(DEAF, stop_s=600.0)
    keeping = asyncio.create_task(child.keep_running())
    await until(lambda: bool(lines))
    pid = child.pid
    stopping = asyncio.create_task(child.stop())
    await asyncio.wait([stopping], timeout=0.05)
    keeping.cancel()
    async with asyncio.timeout(waiting.WAIT_S):
        await stopping
    assert pid is not None
    assert not psutil.pid_exists(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills children with their parent")
async def test_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from laps_sd.supervise import Child, Command\n"
        "command = Command('small', [sys.executable, '-c', 'import os, time; print(os.getpid()); time.sleep(600)'],\n"
        "                  {'PYTHONUNBUFFERED': '1'})\n"
        "asyncio.run(Child(command, lambda line: print(line.decode(), end='', flush=True)).keep_running())"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    child = psutil.Process(int(await parent.stdout.readline()))
    parent.kill()
    await parent.wait()
    await until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


async def test_a_child_behind_another_program_is_not_tried_again_either_if_it_refuses_its_flags() -> None:
    lines: list[bytes] = []
    said = ["worker, stage 0 of 2: no such model", "Failures:", "[0]:", "  exitcode  : 2 (pid: 7)", "-----"]
    program = f"print({chr(10).join(said)!r}); raise SystemExit(1)"
    child = Child(Command("small", [sys.executable, "-c", program], refused=b"exitcode  : 2 "), lines.append)
    with pytest.raises(GaveUp, match=r"refuses its settings .*: worker, stage 0 of 2: no such model"):
        await child.keep_running()
    assert lines.count(b"worker, stage 0 of 2: no such model\n") == 1


async def test_a_child_that_was_told_to_go_by_others_stays_away() -> None:
    lines: list[bytes] = []
    child = Child(Command("small", [sys.executable, "-c", "print('gone for good')"], left=b"for good"), lines.append)
    async with asyncio.timeout(waiting.WAIT_S):
        await child.keep_running()
    assert (lines, child.gone) == ([b"gone for good\n"], True)


async def test_a_log_that_cannot_be_written_holds_up_no_child(tmp_path: Path) -> None:
    done = tmp_path / "done"
    program = f"from pathlib import Path; print('words\\n' * 200_000); Path({str(done)!r}).touch(); {SLEEPS}"

    def full(line: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    child = Child(Command("small", [sys.executable, "-c", program]), partial(emit_entry, full, "small"))
    async with kept(child):
        await until(done.exists)


def test_a_log_that_nobody_reads_any_more_is_no_failure() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    program = "from laps_sd.stack import emit_entry, to_stderr; emit_entry(to_stderr, 'small', b'words')"
    with os.fdopen(writer) as log:
        assert subprocess.run([sys.executable, "-c", program], stderr=log, timeout=waiting.WAIT_S).returncode == 0
