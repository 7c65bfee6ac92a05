"""The same cells on this code and on another checkout of it, in turn, so that both see the same machine. Each side runs
its own bench in a process of its own: they need not speak the same wire. Nothing is measured here."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

from laps_sd.schedbench.cells import Shape
from laps_sd.scratch import scratch

OURS = Path(__file__).parents[2]  # the checkout that this file is part of


class OtherFailed(Exception):
    """The bench of a checkout did not end well. The message holds its last lines."""


def compare(
    shape: Shape, checkout: Path, arguments: Sequence[str], slots: int, repetitions: int, say: Callable[[str], object]
) -> dict[str, Any]:
    """Run the cell on both sides, `repetitions` times; who goes first changes each time. `arguments`: flags beside the
    cell's that both sides know. Raises OtherFailed."""
    words = [*cell_words(shape), *arguments]
    runs: dict[Path, list[dict[str, Any]]] = {OURS: [], checkout: []}
    for number in range(repetitions):
        for side in (OURS, checkout) if number % 2 == 0 else (checkout, OURS):
            runs[side].append(cell := bench(side, words))
            say(f"{side}: {cell['commands_per_cpu_s']:.0f} commands / CPU s")
    return ratio(shape, runs[OURS], runs[checkout], slots)


def cell_words(shape: Shape) -> list[str]:
    """The flags of a cell; those of later date only where they say something."""
    told = {name: count for name, count in asdict(shape).items() if name in ("workers", "waiting") or count > 1}
    return [word for name, count in told.items() for word in (f"--{name}", str(count))]


def ratio(shape: Shape, ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]], slots: int) -> dict[str, Any]:
    """Ours over theirs in rows acknowledged per CPU second of the scheduler, over all pairs of runs.

    `rows_per_command`, `ended_per_command`: means of ours and of theirs. If they differ, the two did not do the same
    work. A checkout whose bench counts no rows is taken to have filled every slot of every report, the most there is.
    """
    pairs = [rows_per_cpu_s(our, slots) / rows_per_cpu_s(their, slots) for our, their in zip(ours, theirs, strict=True)]
    return asdict(shape) | {
        "least": min(pairs),
        "median": median(pairs),
        "most": max(pairs),
        "ours_commands_per_cpu_s": median(cell["commands_per_cpu_s"] for cell in ours),
        "theirs_commands_per_cpu_s": median(cell["commands_per_cpu_s"] for cell in theirs),
        "rows_per_command": [fmean(cell.get("rows_per_command", slots) for cell in side) for side in (ours, theirs)],
        "ended_per_command": [fmean(cell["ended_per_command"] for cell in side) for side in (ours, theirs)],
    }


def rows_per_cpu_s(cell: dict[str, Any], slots: int) -> float:
    return float(cell.get("rows_per_cpu_s", slots * cell["commands_per_cpu_s"]))


def bench(checkout: Path, words: Sequence[str]) -> dict[str, Any]:
    """The one cell that `laps-sd bench scheduler` of that checkout measures. Raises OtherFailed."""
    with scratch() as folder:
        file = folder / "cell.json"
        command = [sys.executable, "-P", "-m", "laps_sd.cli", "bench", "scheduler", *words, "--json", str(file)]
        environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            last = "\n".join(done.stderr.splitlines()[-10:])
            raise OtherFailed(f"the bench of {checkout} ended with {done.returncode}:\n{last}")
        cell: dict[str, Any] = json.loads(file.read_text())["cells"][0]
        return cell
