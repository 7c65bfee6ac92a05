"""`python -m laps_sd.compare.chart`: the README's plot of a comparison, docs/benchmarks/policies.svg, made
of the JSON alone: what each policy does to the mean latency, and what that costs the slowest. Needs matplotlib, of the
extra `lab`."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from laps_sd.compare.design import BASE
from laps_sd.compare.summary import OURS, whole
from scheduler_service.sim import drawing

CELL = "2 slots, load 0.85"
_NAMES = {
    BASE: f"first come, first served ({BASE})",
    "srpt-length": "shortest remaining (srpt-length)",
    "laps-sd": "the paper's (laps-sd)",
    OURS: f"the default ({OURS})",
}


def chart(summary: Mapping[str, Any]) -> Figure:
    """Of the policies that served every request of the cell: the ratio of means with its interval, and the 99th
    percentile in seconds."""
    cell = next(cell for cell in summary["cells"] if cell["name"] == CELL)
    rows = sorted(whole(cell).items(), key=lambda named: -named[1]["ratio"]["value"])
    names = [_NAMES.get(name, name) for name, _ in rows]
    colors = ["#0d9488" if name == OURS else "#94a3b8" for name, _ in rows]
    figure = Figure(figsize=(8, 0.7 + 0.36 * len(rows)), layout="constrained")
    mean, tail = figure.subplots(1, 2, sharey=True)
    ratios = [row["ratio"] for _, row in rows]
    values = [ratio["value"] for ratio in ratios]
    ends = [[ratio["value"] - ratio["low"] for ratio in ratios], [ratio["high"] - ratio["value"] for ratio in ratios]]
    mean.barh(names, values, xerr=ends, color=colors, error_kw={"elinewidth": 1, "capsize": 3})
    for place, value in enumerate(values):
        mean.text(0.03, place, f"{value:.2f}", va="center", color="white", fontweight="bold")
    mean.axvline(1, color="grey", linewidth=0.8)
    mean.set_title(f"mean latency over that of {BASE}", loc="left", fontsize="medium")
    seconds = [row["e2el_ms"]["p99"] / 1e3 for _, row in rows]
    tail.bar_label(tail.barh(names, seconds, color=colors), fmt="%.1f", padding=3)
    tail.set_xlim(0, 1.15 * max(seconds))
    tail.set_title("99th percentile of latency, s", loc="left", fontsize="medium")
    for axis in (mean, tail):
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    return figure


def main() -> None:
    """Another folder than docs may be named."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs") / "benchmarks"
    summary = json.loads((folder / "record.json").read_text())
    (folder / "policies.svg").write_text(drawing.file_of(chart(summary)))


if __name__ == "__main__":
    main()
