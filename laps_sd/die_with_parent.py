"""A launcher: `python die_with_parent.py PARENT_PID PROGRAM ARGUMENT...` runs PROGRAM, which cannot outlive its parent.

It is a program of its own because the alternative is Python code between fork and exec (preexec_fn), which is not safe
in a process with threads, as gRPC's has. Linux only: on other systems PROGRAM just runs.
"""

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2); survives exec

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of ours; a Python that is run looks after Ctrl-C itself
    import ctypes  # it takes a while

    parent, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if int(parent) not in (0, os.getppid()):  # 0: any parent
            sys.exit("the parent is gone already")
    os.execv(command[0], command)
