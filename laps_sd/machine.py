"""What figures were measured on, and when: machine, versions, date. Measures nothing."""

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("laps-sd", "torch", "transformers", "grpcio", "redis")


def facts(words: Sequence[str] | None = None) -> dict[str, str]:
    """For a report: what it was made on, when and by which command. `words`: of the command, after `laps-sd`; default:
    this process's."""
    about = machine()
    return {
        "machine": f"{about['processor']}, {about['cores']} cores",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": versions().get("laps-sd", "not installed"),
        "command": shlex.join(["laps-sd", *(sys.argv[1:] if words is None else words)]),
    }


def machine() -> dict[str, Any]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return {"processor": next(names, platform.machine()), "cores": os.cpu_count()}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def cores() -> int:
    """The cores that this process may use. Systems other than Linux do not say; there it is all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
