"""Policies tried on recorded runs: the requests of docs/benchmarks/recordings, simulated with the step costs that were
measured. Nothing runs live.

`python -m laps_sd.compare.trial --help`. It prints Markdown: for each policy the mean latency over that of the first
one, with a 95 % interval over the draws, p99 of latency and of first token over the first one's, p99 of the longest
pause in seconds, the share answered in time, and how often a request was paused. `--draws N` judges on requests and
arrivals drawn anew.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from laps_sd.compare.design import BASE, BURST, Cell, Run, due
from laps_sd.compare.replay import fleet_of_cell, recording_of
from scheduler_service.core.policies import LapsSd
from scheduler_service.sim.oracle import parts, simulated_policy
from scheduler_service.sim.phases import phases, watched
from scheduler_service.sim.results import interval_95, summarise
from scheduler_service.sim.simulator import simulate
from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job, read_workload

CELLS = "2@0.85,2@0.95,4@0.85,4@0.95,2@burst,4@burst"
Figures = dict[str, dict[str, float]]  # policy -> figure -> value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="fcfs,srpt-length,gittins,oracle", metavar="P,P,...")
    parser.add_argument("--cells", default=CELLS, metavar="SLOTS@LOAD,...")
    parser.add_argument("--draws", type=int, default=0, help="0: the recorded requests at the recorded times")
    parser.add_argument("--seed", type=int, default=1, help="of the draws")
    parser.add_argument("--folder", type=Path, default=Path("docs/benchmarks"), help="with record.json and recordings/")
    parser.add_argument("--kv-tokens", type=int, default=0, help="of memory; 0: as recorded")
    parser.add_argument("--json", type=Path, metavar="FILE")
    flags = parser.parse_args()
    if flags.draws < 0:
        parser.error("--draws: 0 or more")
    policies = flags.policy.split(",")
    try:
        summary = json.loads((flags.folder / "record.json").read_text())
        found = {(cell["slots"], cell["load"]): cell for cell in summary["cells"]}
        cells = [found[int(slots), load] for slots, _, load in (each.partition("@") for each in flags.cells.split(","))]
        for text in policies:
            simulated_policy(*parts(text), [], 4)
        for cell in cells:
            recordings(cell, flags.folder / "recordings")
    except KeyError as error:
        parser.error(f"--cells: {error} was not recorded")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    results: dict[str, list[Figures]] = {}
    for cell in cells:
        workloads = recorded if not flags.draws else drawn(range(flags.draws), flags.seed)
        fleet = fleet_of_cell(cell, summary, flags.kv_tokens)
        runs = [tried(policies, jobs, fleet) for jobs in workloads(summary, cell, flags.folder / "recordings")]
        results[cell["name"]] = runs
        print(f"\n{cell['name']}, {len(runs)} draws\n\n{table(policies, runs)}", flush=True)
    if flags.json:
        flags.json.write_text(json.dumps(results, indent=1) + "\n")


def recordings(cell: Mapping[str, Any], folder: Path) -> list[Path]:
    """Of every repetition that has one. Raises ValueError if none has."""
    place = Cell(cell["slots"], cell["load"])
    every = [recording_of(folder, Run(place, BASE, repetition)) for repetition in range(1, 100)]
    found = [path for path in every if path.exists()]
    if not found:
        raise ValueError(f"{folder} has no recording of {place.name}")
    return found


def recorded(summary: Mapping[str, Any], cell: Mapping[str, Any], folder: Path) -> Iterator[list[Job]]:
    return map(read_workload, recordings(cell, folder))


def drawn(
    draws: Iterable[int], seed: int
) -> Callable[[Mapping[str, Any], Mapping[str, Any], Path], Iterator[list[Job]]]:
    """Requests drawn with replacement from all that were recorded in a cell, at new times, for each of these draws."""

    def draw(summary: Mapping[str, Any], cell: Mapping[str, Any], folder: Path) -> Iterator[list[Job]]:
        pool = [job for jobs in recorded(summary, cell, folder) for job in jobs]
        run = Run(Cell(cell["slots"], cell["load"]), BASE, 1)
        capacity = summary["capacity"][run.capacity.name]
        for number in draws:
            rng = Random(f"trial {seed} {number} {cell['name']}")
            count = summary["settings"]["requests"]
            times = due(replace(run, repetition=rng.randrange(10_000, 10**9)), count, capacity, seed)
            if cell["load"] == BURST:
                times = [0.0] * count
            yield [
                replace(rng.choice(pool), id=f"{index:07d}", arrival_s=at_s) for index, at_s in enumerate(sorted(times))
            ]

    return draw


def tried(policies: Sequence[str], jobs: Sequence[Job], fleet: SimFleet) -> Figures:
    """The figures of each policy on the same jobs; of `laps-sd` those of its phases, too."""
    results: Figures = {}
    for text in policies:
        policy = simulated_policy(*parts(text), jobs, fleet.reference_draft)
        if isinstance(policy, LapsSd):
            policy = watched(policy)
            trace = simulate(jobs, policy, fleet)
            results[text] = summarise(trace) | asdict(phases(policy, trace))
        else:
            results[text] = summarise(simulate(jobs, policy, fleet))
    return results


def table(policies: Sequence[str], runs: Sequence[Figures]) -> str:
    """`runs`: one for each draw. Markdown."""
    lines = ["|policy|mean|p99|p99 first token|p99 pause, s|in time|paused|perceptible|half at round|service before|"]
    lines.append("|---" * 10 + "|")
    for name in policies:
        means, p99s, firsts = (
            [run[name][figure] / max(run[policies[0]][figure], 1e-9) for run in runs]
            for figure in ("mean_e2el_ms", "p99_e2el_ms", "p99_ttft_ms")
        )
        mean, half = interval_95(means)
        cells = [
            f"{mean:.3f}" + ("" if math.isnan(half) else f" ±{half:.3f}"),
            f"{fmean(p99s):.2f}",
            f"{fmean(firsts):.3f}",
            f"{fmean(run[name]['p99_pause_ms'] for run in runs) / 1e3:.2f}",
            f"{fmean(run[name]['good_share'] for run in runs):.1%}",
            f"{fmean(run[name]['preemptions_per_request'] for run in runs):.2f}",
        ]
        for figure, form in (("perceptible", "{:.0%}"), ("half_round", "{:.1f}"), ("before", "{:.0%}")):
            known = figure in runs[0][name]
            cells.append(form.format(fmean(run[name][figure] for run in runs)) if known else "")
        lines.append(f"|{name}|{'|'.join(cells)}|")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
