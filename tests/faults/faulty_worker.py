"""`python -m tests.faults.faulty_worker FOLDER FLAGS`: a real worker on a device that fails when it is told to.

Its next forward pass hangs once FOLDER/hang is there, and once FOLDER/seize is, with Python's lock in hand. A pass dies
with its process if it has a request whose prompt holds POISON.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from worker_service import __main__ as worker
from worker_service import own_engine
from worker_service.engine.engine import Engine
from worker_service.engine.types import Admission, Run, StepResult

POISON = [13, 14, 13, 14, 13]


def faulty(folder: Path) -> type[Engine]:
    class FaultyEngine(Engine):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._poisonous: set[str] = set()

        def admit(self, admission: Admission) -> None:
            tokens = admission.tokens
            if any(list(tokens[at : at + len(POISON)]) == POISON for at in range(len(tokens))):
                self._poisonous.add(admission.request_id)
            super().admit(admission)

        def step(self, runs: Sequence[Run], slots: int) -> StepResult:
            if told(folder / "hang"):
                threading.Event().wait()
            if told(folder / "seize"):
                ctypes.PyDLL(None).pause()
            runnable = [run.request_id for run in runs if self.runnable(run)]
            if self._poisonous.intersection(runnable[:slots]):
                os.kill(os.getpid(), signal.SIGKILL)
            return super().step(runs, slots)

    return FaultyEngine


def told(word: Path) -> bool:
    """Once, to one worker."""
    try:
        word.unlink()
    except FileNotFoundError:
        return False
    return True


if __name__ == "__main__":
    own_engine.Engine = faulty(Path(sys.argv.pop(1)))  # type: ignore[misc]
    worker.main()
