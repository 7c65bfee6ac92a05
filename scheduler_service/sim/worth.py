"""The worth of knowing each request's acceptance: policies beside themselves with every acceptance set to the mean.

`make bench-paper`, or `python -m scheduler_service.sim.worth --help`. It writes worth.json and worth.svg, which the
page on the paper shows. A figure is by how much blindness raises the mean latency, with the half-width of a 95 %
interval over the seeds. The map is acceptance's spread between requests by the spread of lengths; from its middle draft
length, slots and the quality of predictions are varied one at a time. `--logs` marks recorded logs on the map.
"""

import argparse
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, pstdev, variance
from typing import Any

from scheduler_service.sim.bench import one_seed, read_logs
from scheduler_service.sim.generate import KINDS, Synthetic
from scheduler_service.sim.processes import pool
from scheduler_service.sim.results import interval_95
from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job

POLICIES = {"gittins": "gittins:blind=true", "laps-sd": "laps-sd:blind=true"}  # each beside itself, blind
SPREADS = (0.0, 0.05, 0.1, 0.2, 0.3)  # deviation between requests of the chance that a draft token is accepted
LENGTHS = (0.1, 0.5, 1.1, 2.0)  # deviation over mean of output tokens
PAPER_ERROR = 0.0684  # of the paper's estimates
LINES: Mapping[str, Sequence[float]] = {
    "draft length": (1, 2, 4, 8),
    "slots": (1, 2, 4, 8, 16, 32),
    "error of predicted lengths": (0.0, PAPER_ERROR, 0.3, 0.5, 1.0, 3.0),
}
METHODS = ("eagle1", "hydra", "medusa", "sps")  # of the logs
LOGGED_DRAFT = 5  # their depth; longer drafts of `sps` count as so long
LITTLE = 0.02  # worth less than this is not worth a word


@dataclass(frozen=True, slots=True)
class Point:
    """A place on the map. `line`: "map", or what is varied from its middle, to `value`."""

    line: str = "map"
    value: float = 0.0
    spread: float = 0.1
    length_cv: float = 1.1
    draft_len: int = 4
    slots: int = 1
    sigma: float = 0.3
    load: float = 0.85

    def workload(self, requests: int) -> Synthetic:
        """With many slots a run needs more requests to leave its beginning behind."""
        alpha = Synthetic().alpha
        strength = alpha * (1 - alpha) / max(self.spread, 0.005) ** 2 - 1
        return Synthetic(
            requests=requests * max(1, self.slots // 8),
            load=self.load,
            output_mean=100,
            output_cv=self.length_cv,
            sigma=self.sigma,
            alpha_strength=strength,
        )


def points() -> Iterator[Point]:
    for spread in SPREADS:
        for length_cv in LENGTHS:
            yield Point(spread=spread, length_cv=length_cv)
    for value in LINES["draft length"]:
        yield Point("draft length", value, draft_len=int(value))
    for value in LINES["slots"]:
        yield Point("slots", value, slots=int(value), load=0.95)
    for value in LINES["error of predicted lengths"]:
        yield Point("error of predicted lengths", value, sigma=value)


def worth(point: Point, requests: int, seed: int) -> dict[str, float]:
    """By policy the share by which its mean latency is higher if it is blind."""
    fleet = SimFleet(point.slots, draft_len=point.draft_len)
    timed = one_seed([*POLICIES, *POLICIES.values()], fleet, point.workload(requests), (), seed)
    return {name: timed[blind][0] / timed[name][0] - 1 for name, blind in POLICIES.items()}


def measure(requests: int, seeds: int, processes: int) -> list[dict[str, Any]]:
    """A row for each point: its settings, and of each policy a value for each seed. The same for any number of
    `processes`."""
    every = list(points())
    with pool(processes) as workers:
        asked = [(point, requests, seed) for point in every for seed in range(1, seeds + 1)]
        found = list(workers.map(worth, *zip(*asked, strict=True)))
    rows = []
    for index, point in enumerate(every):
        own = found[index * seeds : (index + 1) * seeds]
        rows.append(asdict(point) | {name: [round(each[name], 5) for each in own] for name in POLICIES})
    return rows


def marks(logs: Path | None) -> list[dict[str, Any]]:
    """Public data on the map: kinds of requests as they are generated, and logs if they are at hand. Raises
    ValueError and OSError."""
    found: list[tuple[str, float, float]] = []
    for name, kind in KINDS.items():
        spread = math.sqrt(kind["alpha"] * (1 - kind["alpha"]) / (kind["alpha_strength"] + 1))
        found.append((name, spread, kind["output_cv"]))
    for method in METHODS if logs else ():
        assert logs is not None
        jobs = read_logs(logs, method, LOGGED_DRAFT)
        lengths = [job.output_tokens for job in jobs]
        found.append((method, spread_of(jobs), pstdev(lengths) / fmean(lengths)))
    return [{"name": name, "spread": round(spread, 3), "length_cv": round(cv, 3)} for name, spread, cv in found]


def spread_of(jobs: Sequence[Job]) -> float:
    """Deviation between requests of their chances of acceptance, without what so few rounds make of it by luck: by the
    method of moments."""
    chances, lucks = [], []
    for job in jobs:
        tried = sum(job.accepted) + sum(1 for accepted in job.accepted if accepted < job.draft_len)
        if tried >= 20:
            chance = sum(job.accepted) / tried
            chances.append(chance)
            lucks.append(chance * (1 - chance) / tried)
    return math.sqrt(max(0.0, variance(chances) - fmean(lucks))) if len(chances) > 1 else 0.0


# ---- what the page says ----


def said(results: Mapping[str, Any]) -> Iterator[str]:
    """Sentences chosen by the figures, a line for each policy."""
    rows = results["rows"]
    for name in POLICIES:
        on_map = [row for row in rows if row["line"] == "map"]
        usual = [row for row in on_map if row["spread"] <= 0.1 and row["length_cv"] >= 0.5]
        most = max(usual, key=lambda row: fmean(row[name]))
        best = max(rows, key=lambda row: _surely(row[name]))
        beyond = f"most beyond its interval {_percent(best[name])}, with {_where(best)}"
        beyond = beyond if _surely(best[name]) > 0 else "nowhere beyond its interval"
        where = "under" if fmean(most[name]) < LITTLE else "not under"
        yield (
            f"`{name}`: {where} {LITTLE:.0%} wherever acceptance differs by at most 0.1 and lengths by at least 0.5 "
            f"(at most {_percent(most[name])}); {beyond}."
        )


def lines(results: Mapping[str, Any], line: str) -> Iterator[str]:
    """A line of a table for each policy."""
    rows = [row for row in results["rows"] if row["line"] == line]
    for name in POLICIES:
        yield f"|{line}|{name}|" + ", ".join(f"{row['value']:g}:{_percent(row[name])}" for row in rows) + "|"


def _percent(values: Sequence[float]) -> str:
    mean, half = interval_95(values)
    return f"{100 * mean:.1f}±{100 * half:.1f}"


def _surely(values: Sequence[float]) -> float:
    """The lower end of the interval."""
    mean, half = interval_95(values)
    return mean - half


def _where(row: Mapping[str, Any]) -> str:
    varied = "" if row["line"] == "map" else f", {row['line']} {row['value']:g}"
    return f"a spread of {row['spread']:g} and lengths of CV {row['length_cv']:g}{varied}"


def draw(results: Mapping[str, Any]) -> str:
    """The map as SVG. Needs matplotlib, of the extra `lab`."""
    from matplotlib.figure import Figure

    from scheduler_service.sim import drawing

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    at = {(row["spread"], row["length_cv"]): row for row in results["rows"] if row["line"] == "map"}
    for axis, name in zip(figure.subplots(1, len(POLICIES), sharey=True), POLICIES, strict=True):
        cells = [[100 * fmean(at[spread, cv][name]) for spread in SPREADS] for cv in LENGTHS]
        axis.imshow(cells, cmap="YlGn", vmin=0, vmax=25, aspect="auto", origin="lower")
        for y, row in enumerate(cells):
            for x, value in enumerate(row):
                axis.text(x, y, f"{value:.1f}", ha="center", va="center", fontsize="small")
        for mark in results["marks"]:
            place = _place(SPREADS, mark["spread"]), _place(LENGTHS, mark["length_cv"])
            axis.plot(*place, "x", color="black", markersize=5)
            axis.annotate(mark["name"], place, textcoords="offset points", xytext=(4, 4), fontsize="x-small")
        axis.set_xticks(range(len(SPREADS)), [f"{spread:g}" for spread in SPREADS])
        axis.set_yticks(range(len(LENGTHS)), [f"{cv:g}" for cv in LENGTHS])
        axis.set_xlabel("spread of acceptance between requests")
        axis.set_title(f"{name}: % that blindness costs", loc="left", fontsize="medium")
    figure.axes[0].set_ylabel("CV of output tokens")
    return drawing.file_of(figure)


def _place(ticks: Sequence[float], value: float) -> float:
    """Between the ticks, which are at 0, 1, 2 ..."""
    above = next((index for index, tick in enumerate(ticks) if tick >= value), len(ticks) - 1)
    if above == 0 or value >= ticks[-1]:
        return float(above)
    return above - (ticks[above] - value) / (ticks[above] - ticks[above - 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/paper"), help="folder of worth.json and worth.svg")
    parser.add_argument("--requests", type=int, default=300, help="a seed; more make it finer")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--logs", type=Path, help="JSON Lines of real `accepted_per_step`, to be marked by `method`")
    flags = parser.parse_args()
    if min(flags.requests, flags.seeds - 1, flags.jobs) < 1:
        parser.error("--requests and --jobs must be at least 1, --seeds at least 2")
    path = flags.out / "worth.json"
    try:
        marked = marks(flags.logs)
    except (OSError, ValueError) as error:
        parser.error(f"--logs: {error}")
    if not flags.logs and path.exists():  # the logs that were marked once stay so
        marked += [mark for mark in json.loads(path.read_text())["marks"] if mark["name"] in METHODS]
    rows = measure(flags.requests, flags.seeds, flags.jobs)
    results = {"requests": flags.requests, "seeds": flags.seeds, "marks": marked, "rows": rows}
    flags.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results | {"rows": []})[:-3] + "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]}\n"
    path.write_text(text)
    (flags.out / "worth.svg").write_text(draw(results))


if __name__ == "__main__":
    main()
