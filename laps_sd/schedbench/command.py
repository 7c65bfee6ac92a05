"""`laps-sd bench scheduler`: its flags, what it prints and the record it writes. Nothing is measured here."""

import asyncio
import itertools
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from laps_sd import terminal
from laps_sd.redis_server import NoServer
from laps_sd.schedbench import against, cells, packing, stalls
from laps_sd.schedbench.cells import Shape
from laps_sd.stack import Options
from laps_sd.supervise import GaveUp

SLOTS = 32
# What tells one row of a section from another.
KEY = ("workers", "waiting", "tenants", "gateways", "event", "report_within_ms")


def table(rows: Sequence[object], columns: Mapping[str, str]) -> Table:
    """`columns`: headings, each with how a row fills it, in the language of `str.format`."""
    drawn = Table(*(Column(heading, justify="right") for heading in columns))
    for row in rows:
        drawn.add_row(*(form.format(row) for form in columns.values()))
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
        rows: list[Any] = []
        if stall:
            section, columns = "stalls", stalls.COLUMNS
            rows += asyncio.run(stalls.measure(options, stalls.Scale(slots=batch)))
        elif within_ms:
            section, columns = "packed", packing.COLUMNS
            for many, count, ms in itertools.product(waiting or [1_000], workers or [4], within_ms):
                rows.append(asyncio.run(packing.measure(count, many, batch, ms, options)))
        elif other is not None:
            section, columns = "against", against.COLUMNS
            words = ["--seconds", str(seconds), "--policy", policy]
            words += [] if batch == SLOTS else ["--batch", str(batch)]
            for shape in shapes:
                rows.append(against.compare(shape, other, words, batch, repetitions, _say))
        else:
            section, columns = "cells", cells.COLUMNS
            for shape in shapes:
                rows.append(one := asyncio.run(cells.measure(shape, options, batch, seconds)))
                _say(f"{one.workers} workers, {one.waiting} waiting: {one.commands_per_cpu_s:.0f}")
    except* (ConnectionError, GaveUp, NoServer, TimeoutError, against.OtherFailed) as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        typer.echo(f"laps-sd: {first}", err=True)
        raise typer.Exit(1) from None
    terminal.console().print(table(rows, columns))
    if json_file is not None:
        write(json_file, settings, section, [asdict(row) for row in rows])


def write(file: Path, settings: dict[str, Any], section: str, rows: list[dict[str, Any]]) -> None:
    """Into the record: rows with the same key are replaced, others stay, so that several runs make one record. The
    settings are those of its cells."""
    record = json.loads(file.read_text()) if file.exists() else {}
    if section == "cells" or not record:
        record = {**settings, **record, **settings}
    keys = [[row.get(part) for part in KEY] for row in rows]
    old = [row for row in record.get(section, ()) if [row.get(part) for part in KEY] not in keys]
    record[section] = [*old, *rows]
    file.write_text(json.dumps(record, indent=2) + "\n")


def _say(line: str) -> None:
    typer.echo(line, err=True)
