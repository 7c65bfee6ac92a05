"""Where the metrics of a stack's services are, in a file that Prometheus reads by itself (file_sd). No service lives
here."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from laps_sd.ports import HOST
from laps_sd.supervise import Command

PORT = "--metrics-port"


@contextmanager
def written(path: Path, targets: Iterable[tuple[str, str]]) -> Iterator[None]:
    """The file is there while the block runs, and then no more: nobody is to scrape ports that others may have by
    then."""
    write(path, targets)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def write(path: Path, targets: Iterable[tuple[str, str]]) -> None:
    """`targets`: the name of each process, such as worker-0, and HOST:PORT. The file appears whole."""
    groups = [
        {"targets": [at], "labels": {"service": process.partition("-")[0], "process": process}}
        for process, at in targets
    ]
    draft = path.with_name(path.name + ".tmp")
    try:
        draft.write_text(json.dumps(groups, indent=1) + "\n")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def addresses(services: Iterable[Command]) -> list[tuple[str, str]]:
    """The name of each that has a port for its metrics, with its HOST:PORT."""
    words = [(command.name, list(command.arguments)) for command in services]
    return [(name, f"{HOST}:{each[each.index(PORT) + 1]}") for name, each in words if PORT in each]


def with_metrics(services: Sequence[Command], ports: Sequence[int]) -> tuple[list[Command], list[tuple[str, str]]]:
    """The same services, each with a port for its metrics; and the name of each with its HOST:PORT."""
    pairs = zip(services, ports, strict=True)
    measured = [replace(command, arguments=[*command.arguments, PORT, str(port)]) for command, port in pairs]
    return measured, addresses(measured)
