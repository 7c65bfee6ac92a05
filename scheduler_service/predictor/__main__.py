"""The training process: windows in on stdin, models out on stdout, until its scheduler is gone. It decides nothing."""

import os
import sys

from scheduler_service.predictor.fit import fit
from scheduler_service.predictor.frames import framed, read_frame
from scheduler_service.predictor.window import Window, pack, unpack


def main() -> None:
    os.nice(10)  # serving goes first
    while (payload := read_frame(sys.stdin.buffer)) is not None:
        model = fit(Window.of_arrays(unpack(payload)))
        try:
            sys.stdout.buffer.write(framed(pack(model.arrays())))
            sys.stdout.buffer.flush()
        except BrokenPipeError:  # its scheduler died while it computed
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return


if __name__ == "__main__":
    main()
