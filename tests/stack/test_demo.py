"""`laps-sd demo` from its first line to its last, on a tiny model."""

import asyncio
import os
import sys
from pathlib import Path

import psutil

from tests.tiny_model import make_tiny_model

TIMEOUT_S = 250.0


async def test_the_demo_ends_well_and_leaves_nothing_running(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "laps_sd", "demo", "--model", str(make_tiny_model(tmp_path / "tiny"))]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "COLUMNS": "100"}
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert (process.returncode, "12 of 12 finished" in output.decode()) == (0, True), output.decode()
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or ())]
