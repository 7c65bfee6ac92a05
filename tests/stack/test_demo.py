"""`laps-sd demo` from its first line to its last, on a tiny model."""

import asyncio
import os
import re
import sys
from pathlib import Path

import psutil
import pytest

from laps_sd import demo
from laps_sd.client import Completion, SpecDecode, Stats, Usage
from laps_sd.client.completion import Timings
from laps_sd.demo_view import Answer, Run, comparison
from tests.tiny_model import make_tiny_model

TIMEOUT_S = 250.0


async def test_the_demo_ends_well_and_leaves_nothing_running(tmp_path: Path) -> None:
    picture = tmp_path / "demo.svg"
    command = [sys.executable, "-m", "laps_sd", "demo", "--svg", str(picture)]
    command += ["--model", str(make_tiny_model(tmp_path / "tiny"))]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "COLUMNS": "200"}
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    told = output.decode()
    assert (process.returncode, "gittins: 12 of 12 finished" in told) == (0, True), told
    assert re.search(r"mean latency [0-9.]+ s under gittins, [0-9.]+ s under fcfs .*: [0-9]+% (lower|higher)", told)
    assert "fcfs s" in told
    assert "cdnjs" not in picture.read_text()
    assert "gittins:&#160;12&#160;of&#160;12" in picture.read_text()
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or ())]


def run(policy: str, *latencies_ms: float) -> Run:
    timings = [Timings(queue=0.0, ttft=0.0, e2el=each) for each in latencies_ms]
    done = [Completion("", "", [], "stop", Usage(), SpecDecode(), each, 0, None) for each in timings]
    return Run(policy, [Answer("Hi", 9, completion=each) for each in done], Stats())


def test_the_comparison_tells_what_was_measured_whatever_it_is() -> None:
    better = comparison(
        [run("fcfs", 3000, 5000), run("gittins", 1000, 2000), run("gittins", 2000, 3000), run("fcfs", 4000, 4000)]
    )
    assert better.startswith(
        "mean latency 2.00 s under gittins, 4.00 s under fcfs (first come, first served): 50% lower"
    )
    assert better.endswith("each run: gittins 1.50, 2.50; fcfs 4.00, 4.00")
    once = comparison([run("fcfs", 1000), run("las", 1100)])
    assert once.endswith("10% higher; one run of each, and single runs vary")


def test_a_home_that_cannot_be_written_keeps_no_demo_from_its_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with demo._log() as log:
        log.write(b"words\n")
    assert Path(log.name).read_bytes() == b"words\n"
