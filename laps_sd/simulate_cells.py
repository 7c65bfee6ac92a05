"""The part of `laps-sd simulate` for a service of several cells: what its flags mean, and a table. The simulation is in
scheduler_service/sim/cells.py."""

import re
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, get_args

from scheduler_service.sim.cells import CellSettings, Fared, Kill, Route, run_cells
from scheduler_service.sim.results import times_ms

if TYPE_CHECKING:
    from scheduler_service.sim.workload import Job

HOT = "hot"
TENANTS = 10  # beside the hot one


def parse_routes(text: str) -> list[Route]:
    """Raises ValueError."""
    routes: list[Route] = [route for route in get_args(Route) if route in text.split(",")]
    if len(routes) != len(text.split(",")):
        raise ValueError(f"{text!r} is not of {', '.join(get_args(Route))}, with commas")
    return routes


def parse_kill(text: str | None, cells: int, down_s: float) -> Kill | None:
    """CELL@SECOND. Raises ValueError."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+)@(\d+(?:\.\d+)?)", text)
    if not found or int(found[1]) >= cells:
        raise ValueError(f"{text!r} is not CELL@SECOND, with a cell from 0 to {cells - 1}")
    return Kill(int(found[1]), float(found[2]), down_s)


def with_tenants(jobs: "Sequence[Job]", hot_share: float, seed: int) -> "list[Job]":
    """One tenant sends that share of all requests, ten others the rest."""
    random = Random(f"tenants {seed}")
    if not hot_share:
        return list(jobs)
    return [
        replace(job, tenant=HOT if random.random() < hot_share else f"t{random.randrange(TENANTS)}") for job in jobs
    ]


def run(
    jobs: "Sequence[Job]", settings: CellSettings, routes: Sequence[Route], *, ideal: bool
) -> dict[str, dict[str, float]]:
    """Figures in milliseconds, by route. `ideal`: of one cell that has all workers, too, and that nothing kills."""
    rows: dict[str, dict[str, float]] = {
        route: figures(run_cells(jobs, replace(settings, route=route)), len(jobs)) for route in routes
    }
    if ideal:
        whole = replace(settings.fleet, workers=settings.fleet.workers * settings.cells)
        one = replace(settings, cells=1, fleet=whole, kill=None)
        rows |= {"one ideal cell": figures(run_cells(jobs, one), len(jobs))}
    return rows


def figures(fared: Sequence[Fared], asked: int) -> dict[str, float]:
    """Under the names of one cell's (sim/results.py). Of those that were `asked` all others have failed."""
    row = {"completed": float(len(fared)), "failed": float(asked - len(fared))}
    row |= times_ms("e2el", (one.latency_s for one in fared))
    if hot := [1e3 * one.latency_s for one in fared if one.tenant == HOT]:
        row |= {"hot_mean_ms": fmean(hot)}
    if hot and (others := [1e3 * one.latency_s for one in fared if one.tenant != HOT]):
        row |= {"others_mean_ms": fmean(others)}
    return row


def print_rows(rows: dict[str, dict[str, float]]) -> None:
    from rich.table import Table

    from laps_sd import terminal

    table = Table(box=None, header_style="bold")
    every = ("completed", "failed", "mean_e2el_ms", "p99_e2el_ms", "hot_mean_ms", "others_mean_ms")
    names = [name for name in every if any(name in row for row in rows.values())]
    for title in ("route", *names):
        table.add_column(title, justify="left" if title == "route" else "right")
    for route, row in rows.items():
        table.add_row(route, *(f"{row[name]:,.0f}" if name in row else "-" for name in names))
    terminal.console().print(table)
