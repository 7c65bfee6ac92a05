"""Where the metrics of a stack's services are, in a file that Prometheus reads by itself (file_sd). No service lives
here."""

import json
import os
from collections.abc import Iterable
from pathlib import Path


def write(path: Path, targets: Iterable[tuple[str, str]]) -> None:
    """`targets`: the name of each process, such as worker-0, and HOST:PORT. The file appears whole."""
    groups = [
        {"targets": [at], "labels": {"service": process.partition("-")[0], "process": process}}
        for process, at in targets
    ]
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(json.dumps(groups, indent=1) + "\n")
    os.replace(draft, path)
