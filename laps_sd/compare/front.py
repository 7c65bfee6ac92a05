"""The price of a low mean: settings that trade mean latency against the slowest hundredth, the first token and pauses,
simulated on draws from the recorded live runs (trial.py). Nothing runs live.

`python -m laps_sd.compare.front` writes front.json and front.svg beside the recordings and prints a table. A run that
was stopped goes on where it was.
"""

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from laps_sd.compare import trial
from laps_sd.compare.replay import fleet_of_cell
from scheduler_service import core, sim
from scheduler_service.sim.capped import simulate_capped
from scheduler_service.sim.journal import Journal, code_digest
from scheduler_service.sim.oracle import parts, simulated_policy
from scheduler_service.sim.processes import pool
from scheduler_service.sim.results import interval_95, summarise
from scheduler_service.sim.simulator import simulate
from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job

CELLS = ("2@0.85", "4@0.95")
BASE = "fcfs"
CAP = "cap="  # a setting of the simulation, not of the policy: sim/capped.py
FREE = "gittins:overtaking=0"
FAMILIES: Mapping[str, Sequence[str]] = {
    "no bound": (FREE,),
    "overtaking": tuple(f"gittins:overtaking={bound}" for bound in (5, 20)),
    "ageing": tuple(f"{FREE}:ageing={seconds}" for seconds in (0.03, 0.1, 0.3)),
    "slowdown": tuple(f"{FREE}:{CAP}{times}" for times in (2, 3)),
    "nudge": tuple(f"nudge:passes={passes}" for passes in (1, 4)),
    "opening": tuple(f"gittins:opening={worth}" for worth in ("0.1", "balanced", "first-token")),
    "opening, ageing": (f"{FREE}:opening=balanced:ageing=0.1",),
    "opening, pauses": tuple(f"gittins:opening=balanced:max_pause_s={seconds}" for seconds in (2, 5)),
    "others": ("laps-sd:reading=adapted",),
}
KEPT = ("mean_e2el_ms", "p99_e2el_ms", "p99_ttft_ms", "p99_pause_ms", "good_share")
LESS_IS_BETTER = ("mean", "p99", "first", "pause")


class Unit(NamedTuple):
    """One simulation."""

    folder: Path
    cell: str
    draw: int
    seed: int
    policy: str

    @property
    def name(self) -> str:
        return f"{self.cell}/{self.draw}/{self.policy}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("docs/benchmarks"), help="with record.json and recordings/")
    parser.add_argument("--cells", default=",".join(CELLS), metavar="SLOTS@LOAD,...")
    parser.add_argument("--draws", type=int, default=10, help="at least one")
    parser.add_argument("--seed", type=int, default=19, help="of the draws")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--page", action="store_true", help="simulate nothing, draw and print anew")
    flags = parser.parse_args()
    if min(flags.draws, flags.jobs) < 1:
        parser.error("--draws, --jobs: at least one")
    path = flags.folder / "front.json"
    if flags.page and not path.exists():
        parser.error(f"--page: there is no {path}")
    if not flags.page:
        cells = flags.cells.split(",")
        try:
            summary = json.loads((flags.folder / "record.json").read_text())
            for cell in cells:
                trial.recordings(cell_of(summary, cell), flags.folder / "recordings")
        except (OSError, ValueError) as error:
            parser.error(str(error))
        front = measure(flags.folder, cells, flags.draws, flags.seed, flags.jobs)
        path.write_text(json.dumps(front, indent=1) + "\n")
    front = json.loads(path.read_text())
    (flags.folder / "front.svg").write_text(draw(front))
    print(table(front))


def cell_of(summary: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The recorded cell that is named SLOTS@LOAD. Raises ValueError."""
    found = [cell for cell in summary["cells"] if f"{cell['slots']}@{cell['load']}" == name]
    if not found:
        raise ValueError(f"--cells: {name} was not recorded")
    cell: Mapping[str, Any] = found[0]
    return cell


def measure(folder: Path, cells: Sequence[str], draws: int, seed: int, processes: int) -> dict[str, Any]:
    """The figures of every setting, draw by draw: `cells` by name, each of `settings` with its figures as lists."""
    settings = [BASE, *(policy for some in FAMILIES.values() for policy in some)]
    units = [
        Unit(folder, cell, number, seed, policy) for number in range(draws) for cell in cells for policy in settings
    ]
    run = {"seed": seed, "made_of": code_digest(_made_of(folder))}  # more draws go on from fewer
    with Journal(folder / "front-unfinished.jsonl", run) as journal:
        owed = [unit for unit in units if unit.name not in journal]
        with pool(processes) as workers:
            for unit, figures in zip(owed, workers.map(_measured, owed), strict=True):
                journal.add(unit.name, {unit.policy: figures})
        figures_of = {unit: journal[unit.name][unit.policy] for unit in units}
    found: dict[str, dict[str, dict[str, list[float]]]] = {cell: {} for cell in cells}
    for unit in units:
        row = found[unit.cell].setdefault(unit.policy, {})
        for name, figure in figures_of[unit].items():
            row.setdefault(name, []).append(float(f"{figure:.6g}"))
    return {"draws": draws, "seed": seed, "cells": found}


def _made_of(folder: Path) -> Iterator[Path]:
    """Code and data that figures depend on."""
    for package in (core, sim):
        yield from Path(*package.__path__).rglob("*.py")
    yield from (Path(__file__).with_name(f"{name}.py") for name in ("design", "front", "replay", "trial"))
    yield Path(__file__).parents[1] / "loadtest" / "plan.py"  # draws the arrivals
    yield folder / "record.json"
    yield from (folder / "recordings").iterdir()


def _measured(unit: Unit) -> dict[str, float]:
    jobs, fleet = _drawn(unit.folder, unit.cell, unit.draw, unit.seed)
    name, settings = parts(unit.policy)
    caps = [float(text.removeprefix(CAP)) for text in settings if text.startswith(CAP)]
    settings = [text for text in settings if not text.startswith(CAP)]
    policy = simulated_policy(name, settings, jobs, fleet.reference_draft)
    trace = simulate_capped(jobs, policy, fleet, caps[0]) if caps else simulate(jobs, policy, fleet)
    figures = summarise(trace)
    return {name: figures[name] for name in KEPT}


@lru_cache(maxsize=4)
def _drawn(folder: Path, name: str, number: int, seed: int) -> tuple[list[Job], SimFleet]:
    summary = json.loads((folder / "record.json").read_text())
    cell = cell_of(summary, name)
    (jobs,) = trial.drawn([number], seed)(summary, cell, folder / "recordings")
    return jobs, fleet_of_cell(cell, summary)


# ---- what is said of them ----


def points(rows: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, float]]:
    """Of each setting: `mean`, with the `half` of its interval, `p99` and `first` token over those of the base, draw by
    draw; `pause` in seconds, and `good`, the share answered in time."""
    base = rows[BASE]
    found = {}
    for name, row in rows.items():
        over = {key: [a / b for a, b in zip(row[key], base[key], strict=True)] for key in KEPT[:3]}
        mean, half = interval_95(over["mean_e2el_ms"])
        found[name] = {
            "mean": mean,
            "half": half,
            "p99": fmean(over["p99_e2el_ms"]),
            "first": fmean(over["p99_ttft_ms"]),
            "pause": fmean(row["p99_pause_ms"]) / 1e3,
            "good": fmean(row["good_share"]),
        }
    return found


def unbeaten(found: Mapping[str, Mapping[str, float]], price: str) -> set[str]:
    """The settings on the front of `mean` against `price`: no other is as good in both and better in one."""

    def beats(a: Mapping[str, float], b: Mapping[str, float]) -> bool:
        return a["mean"] <= b["mean"] and a[price] <= b[price] and (a["mean"], a[price]) != (b["mean"], b[price])

    return {name for name, row in found.items() if not any(beats(other, row) for other in found.values())}


def table(front: Mapping[str, Any]) -> str:
    """Markdown. A figure with a star is on the front of the mean against it."""
    lines: list[str] = []
    for cell, rows in front["cells"].items():
        found = points(rows)
        fronts = {price: unbeaten(found, price) for price in LESS_IS_BETTER[1:]}
        lines += [f"{cell}, {front['draws']} draws", "", "|setting|mean|p99|p99 first token|p99 pause, s|in time|"]
        lines.append("|---" * 6 + "|")
        for name, row in found.items():
            prices = "|".join(f"{row[price]:.3g}" + "\\*" * (name in fronts[price]) for price in fronts)
            lines.append(f"|{name}|{row['mean']:.3f} ±{row['half']:.3f}|{prices}|{row['good']:.1%}|")
        lines.append("")
    return "\n".join(lines)


def draw(front: Mapping[str, Any]) -> str:
    """As SVG: a row of axes for each cell, mean against each price. Needs matplotlib, of the extra `lab`."""
    from matplotlib.figure import Figure

    from scheduler_service.sim import drawing

    titles = {"p99": "p99 latency over fcfs", "first": "p99 first token over fcfs", "pause": "p99 longest pause, s"}
    cells = front["cells"]
    figure = Figure(figsize=(11, 3.4 * len(cells)), layout="constrained")
    for axes, (cell, rows) in zip(figure.subplots(len(cells), len(titles), squeeze=False), cells.items(), strict=True):
        found = points(rows)
        for axis, (price, title) in zip(axes, titles.items(), strict=True):
            for family, policies in {"fcfs": (BASE,), **FAMILIES}.items():
                mine = sorted((found[policy]["mean"], found[policy][price]) for policy in policies)
                axis.plot(*zip(*mine, strict=True), "o" if family == "others" else "o-", markersize=4, label=family)
            for name in unbeaten(found, price):
                axis.plot(found[name]["mean"], found[name][price], "o", markersize=9, fillstyle="none", color="grey")
            axis.set_title(f"{cell}: {title}", loc="left", fontsize="small")
            axis.set_xlabel("mean latency over fcfs")
            axis.set_ylim(bottom=0)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize="small")
    return drawing.file_of(figure)


if __name__ == "__main__":
    main()
