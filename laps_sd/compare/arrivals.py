"""What further draws of the arrivals would make of a comparison: its recorded requests, simulated at the costs of its
steps. One run has one draw, and near saturation that weighs as much as a policy. `python -m laps_sd.compare.arrivals`.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from laps_sd.compare.design import BASE, BURST, Cell, Run, due
from laps_sd.compare.replay import ORACLE, fleet_of, mean_ms, recording_of
from scheduler_service.sim.costs import StepCosts
from scheduler_service.sim.worker import Fleet
from scheduler_service.sim.workload import Job, read_workload

DRAWS = range(101, 111)  # as repetitions whose arrivals nobody has met live


def other_arrivals(
    summary: Mapping[str, Any], recordings: Path, apply: Callable[..., Iterable[dict[str, float]]] = map
) -> Iterator[dict[str, Any]]:
    """Of each cell with arrivals of its own and a recording: `ratios`, for each policy its mean latency over the
    base's, draw by draw. The requests are those of the first repetition. `apply`: as the built-in `map`; that of a pool
    is faster."""
    settings, capacity = summary["settings"], summary["capacity"]
    for found in summary["cells"]:
        run = Run(Cell(found["slots"], found["load"]), BASE, 1)
        recording = recording_of(recordings, run)
        if run.cell.load == BURST or BASE not in found["policies"] or not recording.exists():
            continue
        jobs = read_workload(recording)
        fleet = fleet_of(run.cell.slots, StepCosts(**found["step_costs"]), settings["draft_len"], found["kv_tokens"])
        times = [
            due(replace(run, repetition=draw), len(jobs), capacity[run.capacity.name], settings["seed"])
            for draw in DRAWS
        ]
        draws = list(apply(partial(_means_ms, jobs, [*found["policies"], ORACLE], fleet), times))
        names = [name for name in draws[0] if name != BASE]
        yield {
            "name": run.cell.name,
            "ratios": {name: [each[name] / each[BASE] for each in draws] for name in names},
        }


def _means_ms(jobs: Sequence[Job], policies: Sequence[str], fleet: Fleet, times: Sequence[float]) -> dict[str, float]:
    """By policy, with arrivals at these times."""
    jobs = [replace(job, arrival_s=arrival_s) for job, arrival_s in zip(jobs, times, strict=True)]
    return {name: mean_ms(jobs, name, fleet) for name in policies}


def main() -> None:
    """From the record in docs/benchmarks and its recordings; another folder may be named."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/benchmarks")
    summary = json.loads((folder / "record.json").read_text())
    with ProcessPoolExecutor() as processes:
        cells = list(other_arrivals(summary, folder / "recordings", processes.map))
    (folder / "arrivals.json").write_text(json.dumps({"draws": len(DRAWS), "cells": cells}, indent=1) + "\n")


if __name__ == "__main__":
    main()
