"""`python -m laps_sd_vllm.child PARENT PROGRAM`: a program as a process that cannot outlive its parent, however that
ends. On Linux alone: elsewhere the program just runs."""

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2)


def main() -> None:
    parent, program = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):
            sys.exit("the parent is gone already")
    runpy.run_module(program, run_name="__main__")


if __name__ == "__main__":
    main()
