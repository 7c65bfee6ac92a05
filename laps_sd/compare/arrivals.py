"""A comparison with other arrival times: its recorded requests, simulated with the step costs that were measured.

A run has one draw of arrival times, and near saturation the draw changes latencies as much as the policy does. Run it
with `python -m laps_sd.compare.arrivals`.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from laps_sd.compare.design import BASE, BURST, Cell, Run, due
from laps_sd.compare.replay import ORACLE, fleet_of_cell, mean_ms, recording_of
from scheduler_service.sim.processes import pool
from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job, read_workload

DRAWS = range(101, 111)  # numbers of repetitions that no live run has


def other_arrivals(
    summary: Mapping[str, Any], recordings: Path, apply: Callable[..., Iterable[dict[str, float]]] = map
) -> Iterator[dict[str, Any]]:
    """For each cell that has a recording and is no burst: `name` and `ratios`, each policy's mean latency divided by
    the base's, draw by draw. The requests are those of the first repetition. `apply`: the built-in `map`, or the faster
    one of a pool of processes."""
    settings, capacity = summary["settings"], summary["capacity"]
    for found, recording in _recorded(summary, recordings):
        run = Run(Cell(found["slots"], found["load"]), BASE, 1)
        if not recording.exists():
            continue
        jobs = read_workload(recording)
        fleet = fleet_of_cell(found, summary)
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


def _recorded(summary: Mapping[str, Any], folder: Path) -> Iterator[tuple[Mapping[str, Any], Path]]:
    """The cells whose requests can come at other times, and where their recordings should be."""
    for found in summary["cells"]:
        if found["load"] != BURST and BASE in found["policies"]:
            yield found, recording_of(folder, Run(Cell(found["slots"], found["load"]), BASE, 1))


def _means_ms(
    jobs: Sequence[Job], policies: Sequence[str], fleet: SimFleet, times: Sequence[float]
) -> dict[str, float]:
    """Mean latency by policy, if the jobs arrive at `times`."""
    jobs = [replace(job, arrival_s=arrival_s) for job, arrival_s in zip(jobs, times, strict=True)]
    return {name: mean_ms(jobs, name, fleet) for name in policies}


def main() -> None:
    """Reads record.json and recordings of docs/benchmarks, or of the folder named as argument; writes arrivals.json."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/benchmarks")
    summary = json.loads((folder / "record.json").read_text())
    for found, recording in _recorded(summary, folder / "recordings"):
        if not recording.exists():
            print(f"{found['name']} is left out: there is no {recording}", file=sys.stderr)
    with pool() as processes:
        cells = list(other_arrivals(summary, folder / "recordings", processes.map))
    if not cells:
        sys.exit("nothing is written: no cell has a recording")
    (folder / "arrivals.json").write_text(json.dumps({"draws": len(DRAWS), "cells": cells}, indent=1) + "\n")


if __name__ == "__main__":
    main()
