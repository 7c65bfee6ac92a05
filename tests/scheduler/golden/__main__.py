"""`python -m tests.scheduler.golden`: write the digests of what the core decides now. `--lines NAME`: all lines of one
scenario, to compare them with those of other code."""

import json
import sys

from tests.scheduler.golden.scenarios import NAMES, PATH, digest, lines

if __name__ == "__main__":
    if sys.argv[1:2] == ["--lines"]:
        print(*lines(sys.argv[2]), sep="\n")  # noqa: T201
    else:
        PATH.write_text(json.dumps({name: digest(name) for name in NAMES}, indent=1) + "\n")
