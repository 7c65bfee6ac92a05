"""Jobs beside the engine: none waits for one of another kind, and no process outlives the engine. vLLM is not needed
for that."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from laps_sd_vllm.background import FIT, Background

ENDLESS = "tests.vllm.endless"
ENGINE = (
    "import sys; from laps_sd_vllm.background import Background; background = Background(); "
    f"background.start('fit', lambda: background.run('{ENDLESS}', sys.argv[1].encode(), 3600.0), process=True); "
    "sys.stdin.read()"
)


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.timeout(120)
def test_files_do_not_wait_for_processes() -> None:
    background, over, written = Background(), threading.Event(), threading.Event()
    background.start("compare", over.wait, process=True)
    background.start("status", written.set)
    assert written.wait(60)
    assert "compare" in background._under_way
    over.set()
    background.close(60)
    assert {name for name, _, _ in background.results()} == {"compare", "status"}


@pytest.mark.timeout(120)
def test_at_the_end_a_process_under_way_is_ended_and_none_is_begun(pipe: Path) -> None:
    background = Background()
    for name in ("fit", "compare"):
        background.start(name, lambda: background.run(ENDLESS, str(pipe).encode(), 3600.0), process=True)
    with pipe.open() as process:
        assert process.readline() == "began\n"
        thread = background._processes._thread
        background.close(0.0)
        assert process.read() == ""  # its end has closed it
    assert thread is not None
    thread.join(60)
    told = {name: str(error) for name, _, error in background.results()}
    assert told == {
        "fit": f"{ENDLESS} ended with status -9: it said nothing",
        "compare": f"{ENDLESS} is not begun at the end",
    }


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ends processes with their parents")
@pytest.mark.timeout(120)
def test_a_process_ends_with_an_engine_that_is_killed(pipe: Path) -> None:
    engine = subprocess.Popen((sys.executable, "-c", ENGINE, str(pipe)), stdin=subprocess.PIPE)
    with pipe.open() as process:
        assert process.readline() == "began\n"
        engine.send_signal(signal.SIGKILL)
        assert process.read() == ""
    engine.communicate()


@pytest.mark.timeout(120)
def test_a_process_that_takes_too_long_is_ended(pipe: Path) -> None:
    background = Background()
    with pytest.raises(subprocess.TimeoutExpired):
        background.run(ENDLESS, str(pipe).encode(), 0.0)


def test_a_program_that_fails_is_told_in_a_sentence() -> None:
    with pytest.raises(OSError, match=f"{FIT} ended with status 1: .*"):
        Background().run_framed(FIT, b"nonsense", 60.0)
