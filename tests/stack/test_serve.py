"""How a stack that fails ends: a sentence, and an exit code that says whether starting again is of use."""

import asyncio
import os
import signal
from typing import Any

import pytest
import typer

from laps_sd import serve
from laps_sd.options import Options
from laps_sd.ports import StackError
from laps_sd.supervise import GaveUp


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
