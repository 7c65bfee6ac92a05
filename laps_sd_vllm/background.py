"""What takes long, beside the engine's thread: fits and comparisons, each in a process of low priority, and files. One
thread does one thing at a time. Nothing here touches the engine's state: jobs get copies, results wait to be fetched.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from scheduler_service import predictor
from scheduler_service.predictor.frames import HEAD, framed

FIT = (sys.executable, "-m", predictor.__name__)
COMPARE = (sys.executable, "-m", f"{__package__}.side_by_side")
FIT_S, COMPARE_S = 60.0, 120.0  # deadlines, the start of the process included

Result = tuple[str, Any, Exception | None]  # the job's name, what it returned, why it did not


class Background:
    """Its thread starts with the first job, and never keeps the process from ending."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[str, Callable[[], Any]] | None] = SimpleQueue()
        self._done: SimpleQueue[Result] = SimpleQueue()
        self._under_way: set[str] = set()
        self._thread: threading.Thread | None = None

    def start(self, name: str, job: Callable[[], Any]) -> bool:
        """False, and nothing happens, while one of that name is under way."""
        if name in self._under_way:
            return False
        self._under_way.add(name)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="laps-sd", daemon=True)
            self._thread.start()
        self._jobs.put((name, job))
        return True

    def results(self) -> list[Result]:
        """Of the jobs that have ended since this was asked last. Never waits."""
        results: list[Result] = []
        while not self._done.empty():
            try:
                results.append(self._done.get_nowait())
            except Empty:
                break
            self._under_way.discard(results[-1][0])
        return results

    def close(self, within_s: float) -> None:
        """Wait so long for the jobs under way, then leave them."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(within_s)
            self._thread = None

    def _run(self) -> None:
        while (next_job := self._jobs.get()) is not None:
            name, job = next_job
            try:
                self._done.put((name, job(), None))
            except Exception as error:  # whoever asked decides what it means
                self._done.put((name, None, error))


def run(command: tuple[str, ...], question: bytes, deadline_s: float) -> bytes:
    """The answer of the process. Raises OSError if it fails, subprocess.TimeoutExpired if it takes too long."""
    done = subprocess.run(command, input=question, capture_output=True, timeout=deadline_s, start_new_session=True)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise OSError(f"{command[-1]} ended with status {done.returncode}: {said[-1] if said else 'it said nothing'}")
    return done.stdout


def run_framed(command: tuple[str, ...], question: bytes, deadline_s: float) -> bytes:
    """The same in frames (predictor/frames.py). Raises OSError, also where the answer was cut short."""
    answer = run(command, framed(question), deadline_s)
    if len(answer) < HEAD.size or HEAD.unpack(answer[: HEAD.size]) != (len(answer) - HEAD.size,):
        raise OSError(f"{command[-1]} answered {len(answer)} bytes, which are no frame")
    return answer[HEAD.size :]


def write_whole(file: Path, content: bytes) -> None:
    """All of it or nothing, whoever reads at that moment. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    half = file.with_name(f"{file.name}.{os.getpid()}-{threading.get_ident()}.new")
    half.write_bytes(content)
    half.replace(file)
