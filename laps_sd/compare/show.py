"""A comparison on the terminal: a table for each cell, then remarks. Computes no statistics."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Group

from laps_sd.compare.design import BASE
from laps_sd.compare.replay import ORACLE
from laps_sd.compare.summary import sentences, span
from laps_sd.tables import Column, FittedTable


def shown(summary: Mapping[str, Any]) -> Group:
    return Group(*(table(cell) for cell in summary["cells"]), *sentences(summary))


def table(cell: Mapping[str, Any]) -> Group:
    headings, lines = with_runs(cell)
    columns = [Column(name, rank, left=name == "policy") for name, rank in headings.items()]
    return Group(f"{cell['name']}: {served(cell)}", FittedTable(columns, lines))


def served(cell: Mapping[str, Any]) -> str:
    """How many requests, in words."""
    counts = [row["requests"] for row in cell["policies"].values()]
    fewest, most = min(counts), max(counts)
    return f"{fewest} to {most} requests a policy" if fewest < most else f"{most} requests a policy"


def with_runs(
    cell: Mapping[str, Any], duration: Callable[[float], str] = "{:,.0f}".format
) -> tuple[dict[str, int], list[list[str]]]:
    """Headings, with their ranks, and rows: with a column of runs where policies had different numbers."""
    lines = list(rows(cell, duration))
    repetitions = [row["repetitions"] for row in cell["policies"].values()]
    if len(set(repetitions)) == 1:
        return HEADINGS, lines
    for line, count in zip(lines, [*repetitions, ""], strict=False):  # the oracle, if it is there, has none
        line.insert(1, str(count))
    return {"policy": 0, "runs": 0, **HEADINGS}, lines


# The column that a narrow terminal leaves out first has the highest rank (tables.py).
HEADINGS = {
    "policy": 0,
    "mean ms": 0,
    "p50": 8,
    "p95": 9,
    "p99": 2,
    "ttft ms": 7,
    "ttft p99": 3,
    "pause p99": 4,
    "in time": 5,
    "over fcfs (95 %)": 1,
    "simulated": 11,
    "simulated ms": 12,
    "at equal speed": 10,
    "paused": 6,
    "busy": 13,
    "idle": 14,
}


def rows(cell: Mapping[str, Any], duration: Callable[[float], str]) -> Iterator[list[str]]:
    """The rows of a cell's table; the oracle's is the last. `duration`: how milliseconds are written."""
    for name, row in cell["policies"].items():
        yield [
            name,
            *(duration(row["e2el_ms"][kind]) for kind in ("mean", "p50", "p95", "p99")),
            *(duration(row["ttft_ms"][kind]) for kind in ("mean", "p99")),
            duration(row["pause_ms"]["p99"]) if "pause_ms" in row else "",
            f"{row['good_share']:.1%}" if "good_share" in row else "",
            "1" if name == BASE else span(row) if "ratio" in row else "",
            f"{row['predicted_ratio']:.3f}" if "ratio" in row else "",
            duration(row["predicted_mean_ms"]),
            f"{row['equal_speed_ratio']:.3f}" if "equal_speed_ratio" in row else "",
            f"{row['preemptions_per_request']:.2f}",
            f"{row['busy_share']:.0%}",
            f"{row['idle_share']:.1%}",
        ]
    if oracle := cell["oracle"]:
        known = {
            "policy": ORACLE,
            "simulated": f"{oracle['predicted_ratio']:.3f}",
            "simulated ms": duration(oracle["predicted_mean_ms"]),
        }
        yield [known.get(heading, "") for heading in HEADINGS]
