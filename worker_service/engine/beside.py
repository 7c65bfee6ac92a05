"""Work beside the model's thread, in threads that nobody has to wait for: native code on which a grammar never returns
cannot be stopped. What is worked on is not known here."""

import _thread
import itertools
import os
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
Piece: TypeAlias = "tuple[Callable[[], Any], Future[Any]]"

_TASKS = Path("/proc/self/task")  # on Linux: this process's threads, whose names and scheduling can be changed
_numbers = itertools.count()


def beside(work: Callable[[], T]) -> "Future[T]":
    """Do it in a thread of its own: a daemon, so that it stands in nobody's way, nor in that of the process's end."""
    result: Future[T] = Future()
    _thread.start_new_thread(_settle, (work, result))  # threading.Thread would wait until it runs
    return result


class Helper:
    """A thread that does one piece of work after another: to wake it costs a fifth of what a new thread does."""

    def __init__(self) -> None:
        self._name = f"helper-{next(_numbers) % 10**6}"
        self._work: SimpleQueue[Piece | None] = SimpleQueue()
        weakref.finalize(self, self._work.put, None)
        _thread.start_new_thread(_help, (self._work, self._name))

    def begin(self, work: "Callable[[], T]") -> "Future[T]":
        result: Future[T] = Future()
        self._work.put((work, result))
        return result

    def abandon(self) -> None:
        """Nobody waits for it any more. If it ever returns it ends; until then it, and all threads that it started,
        run only while a core has nothing else to do. Systems other than Linux have no such thing."""
        self._work.put(None)
        for thread in _TASKS.glob("*"):
            with suppress(OSError):  # it has ended meanwhile
                if (thread / "comm").read_text().strip() == self._name:
                    os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))


def _help(work: "SimpleQueue[Piece | None]", name: str) -> None:
    with suppress(OSError):
        (_TASKS / str(_thread.get_native_id()) / "comm").write_text(name)  # threads that it starts inherit the name
    while (piece := work.get()) is not None:
        _settle(*piece)
        del piece  # else it would be kept until the next one comes


def _settle(work: "Callable[[], T]", result: "Future[T]") -> None:
    try:
        result.set_result(work())
    except BaseException as error:  # a panic of native code is no Exception
        result.set_exception(error)
