"""`laps-sd bench scheduler`: its flags, what it prints and the record it writes. Nothing is measured here."""

import asyncio
import itertools
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from laps_sd import terminal
from laps_sd.redis_server import NoServer
from laps_sd.schedbench import against, packing, stalls
from laps_sd.schedbench.cells import Cell, Shape, measure
from laps_sd.stack import Options
from laps_sd.supervise import GaveUp

SLOTS = 32
# What tells one row of a section from another.
KEY = ("workers", "waiting", "tenants", "gateways", "event", "report_within_ms")


def table(cells: Sequence[Cell]) -> Table:
    drawn = Table("workers", "waiting", "tenants", "gateways", "commands / CPU s", "rows / CPU s", "tokens / CPU s")
    for name in ("busy", "peers", "Redis", "p50, p99 ms", "inside ms", "KiB each"):
        drawn.add_column(name)
    for column in drawn.columns:
        column.justify = "right"
    for one in cells:
        rates = (one.commands_per_cpu_s, one.rows_per_cpu_s, one.tokens_per_cpu_s)
        drawn.add_row(
            *(f"{number:,}" for number in (one.workers, one.waiting, one.tenants, one.gateways)),
            *(f"{rate:,.0f}" for rate in rates),
            *(f"{share:.0%}" for share in (one.busy, one.peers_busy, one.redis_share)),
            f"{one.p50_ms:.1f}, {one.p99_ms:.1f}",
            f"{one.inside_p50_ms:.1f}, {one.inside_p99_ms:.1f}",
            f"{one.bytes_per_request / 1024:.1f}",
        )
    return drawn


def scheduler(
    workers: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable. Default: 1, 4, 16, 64.")] = None,
    waiting: Annotated[list[int] | None, typer.Option(min=0, help="Repeatable. Default: 100 to 100,000.")] = None,
    tenants: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable. Default: 1.")] = None,
    gateways: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable. Default: 1.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a report: slots of each worker.")] = SLOTS,
    seconds: Annotated[float, typer.Option(min=0.5, help="Of each of a cell's two measurements.")] = 10.0,
    policy: Annotated[str, typer.Option(help="As of `laps-sd up`.")] = "default",
    within_ms: Annotated[
        list[int] | None,
        typer.Option(
            "--report-within-ms", min=0, help="Repeatable. Other cells: workers with rounds of 25 ms pack so."
        ),
    ] = None,
    stall: Annotated[
        bool, typer.Option("--stalls", help="No cells: how long the loops of scheduler and gateway are held at most.")
    ] = False,
    other: Annotated[
        Path | None,
        typer.Option("--against", metavar="FOLDER", exists=True, help="Another checkout: run each cell on both."),
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="With --against: of each cell on each side.")] = 3,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="What FILE holds of other cells and measurements stays in it."),
    ] = None,
) -> None:
    """The scheduler and its Redis alone, between workers and gateways that cost next to nothing.

    At capacity: commands, rows and tokens for each second of the scheduler's CPU time. At half of it: how long a
    worker waits for its command. Every combination of --workers, --waiting, --tenants and --gateways is a cell.
    """
    shapes = [
        Shape(workers=count, waiting=many, tenants=who, gateways=doors)
        for many, doors, who, count in itertools.product(
            waiting or [100, 1_000, 10_000, 100_000], gateways or [1], tenants or [1], workers or [1, 4, 16, 64]
        )
    ]
    settings = {"slots": batch, "seconds": seconds, "policy": policy, "python": platform.python_version()}
    options = Options(policy=policy, max_backlog_s="inf", log_level="warning", grpc_port=0)
    try:
        found: dict[str, list[dict[str, Any]]]
        if stall:
            held = asyncio.run(stalls.measure(options, stalls.Scale(slots=batch)))
            found, drawn = {"stalls": [asdict(one) for one in held]}, stalls.table(held)
        elif within_ms:
            shapes_of = itertools.product(waiting or [1_000], workers or [4], within_ms)
            packed = [asyncio.run(packing.measure(count, many, batch, ms, options)) for many, count, ms in shapes_of]
            found, drawn = {"packed": [asdict(one) for one in packed]}, packing.table(packed)
        elif other is not None:
            words = ["--seconds", str(seconds), "--policy", policy]
            words += [] if batch == SLOTS else ["--batch", str(batch)]
            ratios = [against.compare(shape, other, words, batch, repetitions, _say) for shape in shapes]
            found, drawn = {"against": [asdict(one) for one in ratios]}, against.table(ratios)
        else:
            cells = []
            for shape in shapes:
                cells.append(one := asyncio.run(measure(shape, options, batch, seconds)))
                _say(f"{one.workers} workers, {one.waiting} waiting: {one.commands_per_cpu_s:.0f}")
            found, drawn = {"cells": [asdict(one) for one in cells]}, table(cells)
    except* (ConnectionError, GaveUp, NoServer, TimeoutError, against.OtherFailed) as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        typer.echo(f"laps-sd: {first}", err=True)
        raise typer.Exit(1) from None
    terminal.console().print(drawn)
    if json_file is not None:
        write(json_file, settings, found)


def write(file: Path, settings: dict[str, Any], found: dict[str, list[dict[str, Any]]]) -> None:
    """Into the record: rows with the same key are replaced, others stay, so that several runs make one record. The
    settings are those of its cells."""
    record = json.loads(file.read_text()) if file.exists() else {}
    if "cells" in found or not record:
        record = {**settings, **record, **settings}
    for name, new in found.items():
        keys = [[one.get(part) for part in KEY] for one in new]
        old = [one for one in record.get(name, ()) if [one.get(part) for part in KEY] not in keys]
        record[name] = [*old, *new]
    file.write_text(json.dumps(record, indent=2) + "\n")


def _say(line: str) -> None:
    typer.echo(line, err=True)
