"""`laps-sd bench scheduler`: its flags, what it prints and the record it writes. Nothing is measured here."""

import itertools
import json
import platform
from pathlib import Path
from typing import Annotated, Any

import typer

from laps_sd import terminal
from laps_sd.options import Options
from worker_service.outputs import writable

SLOTS = 32
SHAPE = {name: f"{{{name}:,}}" for name in ("workers", "waiting", "tenants", "gateways")}
# Each section of the record: the headings of its table, and how a row of the section fills them.
SECTIONS = {
    "cells": {
        **SHAPE,
        "commands / CPU s": "{commands_per_cpu_s:,.0f}",
        "rows / CPU s": "{rows_per_cpu_s:,.0f}",
        "tokens / CPU s": "{tokens_per_cpu_s:,.0f}",
        "stored": "{stored_share:.0%}",
        "busy": "{busy:.0%}",
        "peers": "{peers_busy:.0%}",
        "Redis": "{redis_share:.0%}",
        "p50, p99 ms": "{p50_ms:.1f}, {p99_ms:.1f}",
        "inside ms": "{inside_p50_ms:.1f}, {inside_p99_ms:.1f}",
        "bytes each": "{bytes_per_request:,.0f}",
    },
    "against": {
        **SHAPE,
        "ours / theirs": "{median:.2f}",
        "least": "{least:.2f}",
        "most": "{most:.2f}",
        "commands / CPU s": "{ours_commands_per_cpu_s:,.0f}, {theirs_commands_per_cpu_s:,.0f}",
        "rows / command": "{rows_per_command[0]:.2f}, {rows_per_command[1]:.2f}",
        "ended / command": "{ended_per_command[0]:.2f}, {ended_per_command[1]:.2f}",
    },
    "packed": {
        "workers": "{workers:,}",
        "waiting": "{waiting:,}",
        "within ms": "{report_within_ms}",
        "commands / s": "{commands_per_s:,.0f}",
        "rows / s": "{rows_per_s:,.0f}",
        "busy": "{busy:.0%}",
        "stood": "{stood_share:.0%}",
        "mean latency s": "{mean_latency_s:.3f}",
        "p99 gap ms": "{p99_gap_ms:.0f}",
        "preemptions": "{preemptions:,}",
        "rounds late": "{late_rounds:.2f}",
        "most": "{most_late_rounds}",
    },
    "stalls": {
        "event": "{event}",
        "scheduler: turn, of CPU ms": "{scheduler[turn_ms]:.1f}, {scheduler[turn_cpu_ms]:.1f}",
        "longest call": "{scheduler[call_cpu_ms]:.1f} {scheduler[call]}",
        "gateway: turn, of CPU ms": "{gateway[turn_ms]:.1f}, {gateway[turn_cpu_ms]:.1f}",
        "longest call ": "{gateway[call_cpu_ms]:.1f} {gateway[call]}",
    },
}
# What tells one row of a section from another.
KEY = ("workers", "waiting", "tenants", "gateways", "event", "report_within_ms")


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
        typer.Option(
            "--json",
            metavar="FILE",
            callback=writable,
            help="What FILE holds of other cells and measurements stays in it.",
        ),
    ] = None,
) -> None:
    """The scheduler and its Redis alone, between workers and gateways that cost next to nothing.

    At capacity: commands, rows and tokens for each second of the scheduler's CPU time. At half of it: how long a
    worker waits for its command. Every combination of --workers, --waiting, --tenants and --gateways is a cell.
    """
    import asyncio  # `--help` needs none of these

    from rich.table import Column, Table

    from laps_sd.redis_server import NoServer
    from laps_sd.schedbench import against, cells, packing, stalls
    from laps_sd.schedbench.cells import Shape
    from laps_sd.supervise import GaveUp

    shapes = [
        Shape(workers=count, waiting=many, tenants=who, gateways=doors)
        for many, doors, who, count in itertools.product(
            waiting or [100, 1_000, 10_000, 100_000], gateways or [1], tenants or [1], workers or [1, 4, 16, 64]
        )
    ]
    record = read(json_file) if json_file is not None else {}
    settings = {"slots": batch, "seconds": seconds, "policy": policy, "python": platform.python_version()}
    options = Options(policy=policy, max_backlog_s="inf", log_level="warning", grpc_port=0)
    try:
        rows: list[dict[str, Any]] = []
        if stall:
            section = "stalls"
            rows += asyncio.run(stalls.measure(options, stalls.Scale(slots=batch)))
        elif within_ms:
            section = "packed"
            for many, count, ms in itertools.product(waiting or [1_000], workers or [4], within_ms):
                rows.append(asyncio.run(packing.measure(count, many, batch, ms, options)))
        elif other is not None:
            section = "against"
            words = ["--seconds", str(seconds), "--policy", policy]
            words += [] if batch == SLOTS else ["--batch", str(batch)]
            for shape in shapes:
                rows.append(against.compare(shape, other, words, batch, repetitions, _say))
        else:
            section = "cells"
            for shape in shapes:
                rows.append(one := asyncio.run(cells.measure(shape, options, batch, seconds)))
                _say("{workers} workers, {waiting} waiting: {commands_per_cpu_s:.0f}".format(**one))
    except* (ConnectionError, GaveUp, NoServer, TimeoutError, against.OtherFailed) as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        typer.echo(f"laps-sd: {first}", err=True)
        raise typer.Exit(1) from None
    columns = SECTIONS[section]
    drawn = Table(*(Column(heading, justify="right", overflow="fold") for heading in columns))
    for row in rows:
        drawn.add_row(*(form.format(**row) for form in columns.values()))
    terminal.console().print(drawn)
    if json_file is not None:
        write(json_file, record, settings, section, rows)


def read(file: Path) -> dict[str, Any]:
    """The record that it holds; an empty file holds an empty one. Raises typer.BadParameter."""
    try:
        record = json.loads(file.read_text() or "{}") if file.exists() else {}
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise typer.BadParameter(f"{file} holds something else than a record", param_hint="--json")
    return record


def write(
    file: Path, record: dict[str, Any], settings: dict[str, Any], section: str, rows: list[dict[str, Any]]
) -> None:
    """With these rows in the record: those with the same key are replaced, others stay, so that several runs make one
    record. The settings are those of its cells."""
    if section == "cells" or not record:
        record = {**settings, **record, **settings}
    keys = [[row.get(part) for part in KEY] for row in rows]
    old = [row for row in record.get(section, ()) if [row.get(part) for part in KEY] not in keys]
    record[section] = [*old, *rows]
    file.write_text(json.dumps(record, indent=2) + "\n")


def _say(line: str) -> None:
    typer.echo(line, err=True)
