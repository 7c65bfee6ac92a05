"""The program `laps-sd`, also `python -m laps_sd`. It imports nothing before Ctrl-C is looked after."""

import io
import os
import sys

from laps_sd.interrupt import quietly


def main() -> None:
    quietly(_run)


def _run() -> None:
    # gRPC's own lines, such as those of handshakes that fail, are no words of ours. It reads this when it is loaded; so
    # do the services that this program starts.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.isatty():
        sys.stdout.reconfigure(errors="replace")  # a terminal may not know each letter of an answer
    from laps_sd.cli import app

    app(prog_name="laps-sd")


if __name__ == "__main__":
    main()
