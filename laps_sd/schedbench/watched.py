"""Runs a service as `python watched.py FILE MODULE ARGUMENTS...` and keeps in FILE how long its event loop was held.

A turn of the loop is what runs between two looks at its sockets: meanwhile no other message is read or answered. A
call is one callback, or one step of a task, within a turn. FILE is shared memory, so whoever reads it costs the
service nothing. This file imports nothing of ours, so that a service of any checkout can be watched.
"""

import asyncio
import gc
import mmap
import runpy
import selectors
import struct
import sys
import time
from pathlib import Path
from typing import Any

# Doubles in FILE, in seconds: the longest turn on the clock and in CPU time of its thread, the longest
# call and the longest garbage collection in CPU time.
TURN_S, TURN_CPU_S, CALL_CPU_S, COLLECTED_CPU_S = range(4)
NAME = slice(4 * struct.calcsize("d"), 160)  # bytes in FILE: of the longest call


class Figures:
    """FILE, shared with every other process that opens it."""

    def __init__(self, file: Path) -> None:
        with file.open("r+b") as opened:
            self._bytes = mmap.mmap(opened.fileno(), NAME.stop)
        self.values = memoryview(self._bytes)[: NAME.start].cast("d")

    @property
    def name(self) -> str:
        return self._bytes[NAME].rstrip(b"\0").decode(errors="replace")

    @name.setter
    def name(self, name: str) -> None:
        size = NAME.stop - NAME.start
        self._bytes[NAME] = name.encode()[:size].ljust(size, b"\0")

    def reset(self) -> None:
        for place in range(len(self.values)):
            self.values[place] = 0.0
        self.name = ""

    def at_least(self, place: int, seconds: float) -> bool:
        """Whether that is more than it was so far."""
        if seconds <= self.values[place]:
            return False
        self.values[place] = seconds
        return True


def watch_turns(figures: Figures) -> None:
    """Measures the time between the end of one `select` of the loop and the beginning of the next."""
    select = selectors.DefaultSelector.select
    began_s, began_cpu_s = time.perf_counter(), time.thread_time()

    def timed(self: Any, timeout: float | None = None) -> Any:
        nonlocal began_s, began_cpu_s
        figures.at_least(TURN_S, time.perf_counter() - began_s)
        figures.at_least(TURN_CPU_S, time.thread_time() - began_cpu_s)
        events = select(self, timeout)
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        return events

    selectors.DefaultSelector.select = timed  # type: ignore[method-assign]


def watch_calls(figures: Figures) -> None:
    run = asyncio.Handle._run

    def timed(handle: Any) -> None:
        callback, began_cpu_s = handle._callback, time.thread_time()
        task = getattr(callback, "__self__", None)
        called = (isinstance(task, asyncio.Task) and task.get_coro()) or callback  # a task that ends forgets it
        run(handle)
        if figures.at_least(CALL_CPU_S, time.thread_time() - began_cpu_s):
            code = getattr(called, "cr_code", None)
            place = f"{'/'.join(Path(code.co_filename).parts[-2:])}: " if code else ""
            figures.name = f"{place}{getattr(called, '__qualname__', None) or repr(called)}"

    asyncio.Handle._run = timed  # type: ignore[method-assign, assignment]


def watch_collections(figures: Figures) -> None:
    began_cpu_s = 0.0

    def note(phase: str, _: dict[str, int]) -> None:
        nonlocal began_cpu_s
        if phase == "start":
            began_cpu_s = time.thread_time()
        else:
            figures.at_least(COLLECTED_CPU_S, time.thread_time() - began_cpu_s)

    gc.callbacks.append(note)


def main() -> None:
    figures = Figures(Path(sys.argv[1]))
    watch_collections(figures)
    watch_calls(figures)
    watch_turns(figures)
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
