"""Ctrl-C: whenever it comes, while modules are loaded too, a program ends with 130, one line and no traceback.

`python -m laps_sd.interrupt MODULE ARGUMENTS...` runs another program so. What programs do is not known here.
"""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

INTERRUPTED = 130  # what shells give a command that Ctrl-C ended


def quietly(program: Callable[[], object]) -> None:
    """Run the program; a KeyboardInterrupt that it does not handle itself ends the process."""
    signals = _noticed()
    sys.unraisablehook = _told_unless_interrupted
    try:
        program()
    except SystemExit as end:
        if end.code == INTERRUPTED:  # it was told already
            _leave()
        raise
    except BaseException as error:
        if not (isinstance(error, KeyboardInterrupt) or _came(signals)):
            raise
        os.write(2, b"interrupted\n")
        _leave()


def _noticed() -> int:
    """A pipe that gets the number of each signal, until asyncio takes signals over. Some modules, when they are
    interrupted while they load, go on, and say later that they cannot be loaded."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return reader


def _came(signals: int) -> bool:
    with suppress(BlockingIOError):
        return signal.SIGINT in os.read(signals, 1 << 16)
    return False


def _told_unless_interrupted(unraisable: "sys.UnraisableHookArgs") -> None:
    """A KeyboardInterrupt in a destructor, or at the very end of the process, cannot be raised: Python would print its
    traceback, and go on."""
    if unraisable.exc_type is KeyboardInterrupt:
        _leave()
    sys.__unraisablehook__(unraisable)


def _leave() -> None:
    """At once: a second Ctrl-C could interrupt what modules do at the end of a process. And where the first came while
    a dataclass was made, Python would end with the signal itself, not with 130."""
    with suppress(OSError, ValueError):  # nobody reads any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(INTERRUPTED)


def _other() -> None:
    from runpy import run_module

    del sys.argv[0]
    run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    quietly(_other)
