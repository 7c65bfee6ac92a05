"""Processes that compute parts of a simulation beside each other. They end with the process that started them, however
that ends, and on Ctrl-C without a word of their own. What they compute is not known here."""

import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process

SPAWN = get_context("spawn")  # a fork would copy the locks of threads that it does not copy


def pool(processes: int | None = None) -> ProcessPoolExecutor:
    """None: as many as there are cores."""
    return ProcessPoolExecutor(processes, SPAWN, begin)


def begin() -> None:
    """The first thing that such a process does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # whoever started it tells what Ctrl-C has ended
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)  # the main thread may wait for work that nobody will send
