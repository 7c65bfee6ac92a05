"""What takes long, beside the engine's thread: fits and comparisons, each in a process of low priority; and files.
Files have a thread, and processes another, since these may take minutes; each does one thing at a time. Nothing here
touches the engine's state: jobs get copies, results wait to be fetched.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

from scheduler_service import predictor
from scheduler_service.predictor.frames import HEAD, framed

FIT, COMPARE = predictor.__name__, f"{__package__}.side_by_side"  # programs
FIT_S, COMPARE_S = 60.0, 120.0  # deadlines, the start of the process included

Result = tuple[str, Any, Exception | None]  # the job's name, what it returned, why it did not


class Line:
    """Jobs, one after the other. Its thread starts with the first one, and never keeps the process from ending."""

    def __init__(self, name: str, done: "SimpleQueue[Result]") -> None:
        self._jobs: SimpleQueue[tuple[str, Callable[[], Any]] | None] = SimpleQueue()
        self._name, self._done = name, done
        self._thread: threading.Thread | None = None

    def start(self, name: str, job: Callable[[], Any]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._jobs.put((name, job))

    def close(self, within_s: float) -> bool:
        """Whether all of them have ended in that time."""
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._jobs.put(None)
        thread.join(within_s)
        return not thread.is_alive()

    def _run(self) -> None:
        while (next_job := self._jobs.get()) is not None:
            name, job = next_job
            try:
                self._done.put((name, job(), None))
            except Exception as error:  # whoever asked decides what it means
                self._done.put((name, None, error))


class Background:
    def __init__(self) -> None:
        self._done: SimpleQueue[Result] = SimpleQueue()
        self._under_way: set[str] = set()
        self._files, self._processes = Line("laps-sd files", self._done), Line("laps-sd processes", self._done)
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False  # no process is started any more
        self._lock = threading.Lock()  # of these two

    def start(self, name: str, job: Callable[[], Any], *, process: bool = False) -> bool:
        """`process`: the job runs one. False, and nothing happens, while one of that name is under way."""
        if name in self._under_way:
            return False
        self._under_way.add(name)
        (self._processes if process else self._files).start(name, job)
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
        """Wait so long for the jobs under way, then end the process of one and leave the others."""
        until = monotonic() + within_s
        self._files.close(within_s)
        if not self._processes.close(max(0.0, until - monotonic())):
            with self._lock:
                self._closed = True
                if self._process is not None:
                    self._process.kill()

    # ---- in a job ----

    def run(self, program: str, question: bytes, deadline_s: float) -> bytes:
        """The answer of a program in a process, which ends with this one. Raises OSError if it fails,
        subprocess.TimeoutExpired if it takes too long."""
        command = (sys.executable, "-m", f"{__package__}.child", str(os.getpid()), program)
        pipe = subprocess.PIPE
        with self._lock:
            if self._closed:
                raise OSError(f"{program} is not begun at the end")
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
            self._process = process
        with process:
            try:
                answer, told = process.communicate(question, deadline_s)
            finally:
                process.kill()  # of no effect once it has ended
        if process.returncode:
            said = told.decode(errors="replace").strip().splitlines()
            raise OSError(
                f"{program} ended with status {process.returncode}: {said[-1] if said else 'it said nothing'}"
            )
        return answer

    def run_framed(self, program: str, question: bytes, deadline_s: float) -> bytes:
        """The same in frames (predictor/frames.py). Raises OSError, also where the answer was cut short."""
        answer = self.run(program, framed(question), deadline_s)
        if len(answer) < HEAD.size or HEAD.unpack(answer[: HEAD.size]) != (len(answer) - HEAD.size,):
            raise OSError(f"{program} answered {len(answer)} bytes, which are no frame")
        return answer[HEAD.size :]


def write_whole(file: Path, content: bytes) -> None:
    """All of it or nothing, whoever reads at that moment. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    half = file.with_name(f"{file.name}.{os.getpid()}-{threading.get_ident()}.new")
    try:
        half.write_bytes(content)
        half.replace(file)
    finally:
        half.unlink(missing_ok=True)
