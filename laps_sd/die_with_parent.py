"""A launcher: `python die_with_parent.py PARENT_PID PROGRAM ARGUMENT...` runs PROGRAM, which cannot outlive its parent.

A program of its own, for the alternative is Python code between fork and exec, which a process with gRPC's threads had
better not run. Linux only; elsewhere it just runs PROGRAM.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2); survives exec

if __name__ == "__main__":
    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if int(parent) not in (0, os.getppid()):  # 0: whoever that is
            sys.exit("the parent is gone already")
    os.execv(command[0], command)
