"""How a stack that fails ends: a sentence, and an exit code that says whether starting again is of use."""

import asyncio
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from laps_sd import serve
from laps_sd.options import Options
from laps_sd.ports import StackError
from laps_sd.supervise import GaveUp
from tests.waiting import WAIT_S


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (GaveUp("worker-0 refuses its settings: no", hopeless=True), 2),
        (GaveUp("worker-0 ended 5 times"), 1),
        (StackError("/data is used by another stack"), 1),
    ],
)
def test_a_failure_is_a_sentence_and_its_exit_code(
    failure: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fails(*_: Any) -> None:
        raise failure

    monkeypatch.setattr(serve, "run", fails)
    with pytest.raises(typer.Exit) as end:
        serve.run_stack(Options(), lambda stack: fails())
    assert end.value.exit_code == code
    assert capsys.readouterr().err == f"laps-sd: {failure}\n"


@pytest.fixture
def hang_ups() -> Iterator[None]:
    """They count, though the tests may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_ups")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_stack_in_good_order(number: signal.Signals) -> None:
    """SIGHUP: the terminal has gone."""
    ended = False

    async def work() -> None:
        nonlocal ended
        try:
            os.kill(os.getpid(), number)
            await asyncio.get_running_loop().create_future()
        finally:
            ended = True

    assert not asyncio.run(serve._until_signal(work()))
    assert ended


HUNG_UP = """
import asyncio, fcntl, os, signal, sys, termios
from pathlib import Path
from protos.serving import stop_signals

async def main():
    async with stop_signals() as stopping:
        print("up", flush=True)
        await stopping.wait()
        os.kill(os.getpid(), signal.SIGHUP)  # the shell says it, too
        await asyncio.sleep(0.01)
        print("ends", flush=True)
        Path(sys.argv[1]).write_text("in order")

fcntl.ioctl(0, termios.TIOCSCTTY, 0)
asyncio.run(main())
"""


@pytest.mark.usefixtures("hang_ups")
def test_a_terminal_that_is_closed_ends_a_process_in_good_order_though_it_writes_still(tmp_path: Path) -> None:
    ours, its = pty.openpty()
    command = [sys.executable, "-c", HUNG_UP, str(tmp_path / "ended")]
    child = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, start_new_session=True)
    os.close(its)
    said = b""
    while b"\n" not in said:  # in pieces; the rest could not be written any more
        said += os.read(ours, 100)
    os.close(ours)
    assert child.wait(WAIT_S) == 0
    assert (tmp_path / "ended").read_text() == "in order"
