"""A load beside the event loop: what it gives, what it raises, and that a process which ends does not wait for it."""

import asyncio
import subprocess
import sys
import threading

import pytest

from tests.waiting import WAIT_S
from worker_service.loading import beside

ENDS = """
import asyncio, threading
from worker_service.loading import beside, leave

async def serve():
    begun = threading.Event()
    load = asyncio.create_task(beside(lambda: (begun.set(), threading.Event().wait())))
    await asyncio.to_thread(begun.wait)
    load.cancel()
    print("stopped")

asyncio.run(serve())
leave(3)
"""


async def test_it_gives_what_the_load_returns_and_raises_what_it_raises() -> None:
    def failing(number: int) -> int:
        return 1 // number

    assert await beside(failing, 1) == 1
    with pytest.raises(ZeroDivisionError):
        await beside(failing, 0)


async def test_whoever_stopped_waiting_hears_nothing_more() -> None:
    go = threading.Event()
    waiting = asyncio.create_task(beside(go.wait))
    await asyncio.sleep(0)
    waiting.cancel()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_a_process_that_ends_does_not_wait_for_a_load() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=WAIT_S)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "stopped\n", "")
