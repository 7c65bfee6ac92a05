"""The status of an engine process: a small file in JSON, which the process that serves /metrics reads. Written
whole or not at all; it holds figures, and nothing of anybody's text."""

import json
import multiprocessing
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from laps_sd_vllm.background import write_whole
from laps_sd_vllm.side_by_side import Figures

SCHEMA = 1
OLD_S = 86_400.0  # files of servers that were killed


@dataclass(slots=True)
class Status:
    """`fallbacks`: how often stock order was fallen back to: 0 or 1, since that is for good. `late_plans`: those over
    the limit. `bad_hints`: requests whose `laps_sd_*` arguments were none."""

    mode: str
    policy: str
    fallbacks: int = 0
    why: str = ""
    plans: int = 0
    planning_s: float = 0.0
    late_plans: int = 0
    bad_hints: int = 0
    finished: int = 0
    predictor: str = "none"
    compared: int = 0  # requests of the last comparison
    window_s: float = 0.0
    policies: dict[str, Figures] = field(default_factory=dict)

    def write(self, file: Path) -> None:
        """Raises OSError."""
        write_whole(file, json.dumps({"schema": SCHEMA, "at": time.time(), **asdict(self)}).encode())


def folder(cache: Path) -> Path:
    """Where these files are, in vLLM's cache folder."""
    return cache / "laps-sd" / "status"


def written(folder: Path, rank: int) -> Path:
    """The file of this engine process, number `rank`, named by the process that started it: of several that serve HTTP
    each has an instance's name of its own, and so has each engine of a data-parallel server."""
    return folder / _name(_started_by(), rank)


def find(folder: Path, rank: int) -> Path:
    """The same file, for a process that serves HTTP: it started the engine, or the same process started both."""
    own, other = (folder / _name(process, rank) for process in (os.getpid(), _started_by()))
    return own if own.exists() else other


def _name(process: int, rank: int) -> str:
    """Containers may share vLLM's cache folder, and in each of them the first process is number 1."""
    numbers = os.stat("/proc/self/ns/pid").st_ino if Path("/proc/self/ns/pid").exists() else 0
    return f"{socket.gethostname()}-{numbers}-{process}-{rank}.json"


def _started_by() -> int:
    parent = multiprocessing.parent_process()
    return os.getpid() if parent is None or parent.pid is None else parent.pid


def read(file: Path) -> dict[str, Any] | None:
    """None: there is none yet, or another version wrote it."""
    try:
        told = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) and told.get("schema") == SCHEMA else None


def clean(folder: Path) -> None:
    """Forget what servers left that were killed, half-written files among it."""
    with suppress(OSError):
        for file in folder.glob("*.json*"):
            if file.stat().st_mtime < time.time() - OLD_S:
                file.unlink(missing_ok=True)
