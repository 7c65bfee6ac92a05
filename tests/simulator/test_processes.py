"""Processes that compute parts of a simulation, seen from outside: when they end, and what they say."""

import os
import signal
import subprocess
import sys

from tests.waiting import WAIT_S

# It says when its helper runs, and then waits for work that never ends.
PROGRAM = """
import signal
from laps_sd.interrupt import quietly
from scheduler_service.sim.processes import pool

def program():
    with pool(1) as helpers:
        helpers.submit(int).result()
        print("computing", flush=True)
        helpers.submit(signal.pause).result()

if __name__ == "__main__":
    quietly(program)
"""


def started() -> "subprocess.Popen[bytes]":
    """Only the program and its helper can write to what it is read from: that ends when both have ended."""
    command = [sys.executable, "-c", PROGRAM]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"computing\n"
    return process


def test_they_end_with_whoever_started_them() -> None:
    with started() as process:
        process.kill()
        assert process.communicate(timeout=WAIT_S)[0] == b""


def test_ctrl_c_is_one_line() -> None:
    with started() as process:
        os.killpg(process.pid, signal.SIGINT)
        assert process.communicate(timeout=WAIT_S) == (b"", b"interrupted\n")
        assert process.returncode == 130
