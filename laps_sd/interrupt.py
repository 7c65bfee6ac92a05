"""Ctrl-C: whenever it comes, while modules are loaded too, a program ends with 130, one line and no traceback.

`python -m laps_sd.interrupt MODULE ARGUMENTS...` runs another program so. What programs do is not known here.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress

INTERRUPTED = 130  # what shells give a command that Ctrl-C ended


def quietly(program: Callable[[], object]) -> None:
    """Run the program; a KeyboardInterrupt that it does not handle itself ends the process."""
    sys.unraisablehook = _told_unless_interrupted
    try:
        program()
    except SystemExit as end:
        if end.code == INTERRUPTED:  # it was told already
            _leave()
        raise
    except BaseException as error:
        if not _stems_from_ctrl_c(error):
            raise
        os.write(2, b"interrupted\n")
        _leave()


def _stems_from_ctrl_c(error: BaseException | None) -> bool:
    """Some modules, when they are interrupted while they load, say that they cannot be loaded."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


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
