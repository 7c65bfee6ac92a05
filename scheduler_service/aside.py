"""The commands of processes of low priority, beside one that serves. Nothing is started here."""

import sys

PROGRAM = (
    "import os, runpy, sys; by, module = sys.argv[1:]; del sys.argv[1:]; os.nice(int(by)); "
    "runpy.run_module(module, run_name='__main__', alter_sys=True)"
)


def aside(module: str, by: int) -> tuple[str, ...]:
    """`python -m MODULE` at a priority lower `by` so much (os.nice). It is lowered before the module is imported: that
    can take longer than what the module is for."""
    return sys.executable, "-c", PROGRAM, str(by), module
