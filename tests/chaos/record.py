"""Runs of the chaos suite as JSON lines, which add up. No stack here."""

import json
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def append(file: Path, run: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        lines.write(json.dumps(run) + "\n")


def runs(file: Path, model: str) -> list[dict[str, Any]]:
    """Those on that model."""
    if not file.exists():
        return []
    return [run for run in map(json.loads, file.read_text().splitlines()) if run["model"] == model]


def struck(of: Iterable[Mapping[str, Any]]) -> int:
    return sum(sum(run["faults"].values()) for run in of)


def totals(of: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers and counts by kind add up, of pauses the longest stays; lists are put together."""
    summed: dict[str, Any] = {"runs": 0}
    for run in of:
        summed["runs"] += 1
        for name, value in run.items():
            if name.startswith("longest_"):
                summed[name] = max(value, summed.get(name, value))
            elif isinstance(value, dict):
                summed[name] = dict(sorted((Counter(summed.get(name, {})) + Counter(value)).items()))
            elif name not in ("seed", "model", "commit"):
                summed[name] = summed.get(name, type(value)()) + value
    return summed


def commit() -> str:
    """Of the working tree, with a + if it has been changed since."""
    command = ["git", "describe", "--always", "--abbrev=7", "--dirty=+", "--exclude=*"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    return said.stdout.strip() or "unknown"
