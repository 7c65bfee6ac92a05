"""mypy refuses wrong uses of the client, as a user's editor would, and takes the right ones."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).with_name("right_and_wrong.py")


def test_mypy_refuses_what_is_wrong_and_nothing_else() -> None:
    lines = EXAMPLE.read_text().splitlines()
    wrong = {at: words[1] for at, line in enumerate(lines, 1) if (words := re.search(r"# wrong: (\S+)", line))}
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-error-summary",
        "--show-error-codes",
        "--no-pretty",
        EXAMPLE,
    ]
    said = subprocess.run([*command, "--follow-imports=silent"], capture_output=True, text=True, timeout=250).stdout
    refused = {
        int(found[1]): found[2]
        for found in re.finditer(r"right_and_wrong\.py:(\d+):(?:\d+:)? error: .*\[(\S+)\]", said)
    }
    assert refused == wrong, said
