"""`laps-sd bench gateway`: its flags, what it prints and the record it writes. Nothing is measured here."""

import json
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from laps_sd import terminal
from worker_service.outputs import writable

# What is said of each figure, how it is written, and its goal.
FIGURES = {
    "ttft_p50_ms": ("first token, p50", "{:.1f} ms", ""),
    "straight_ttft_p50_ms": ("the same without the gateway", "{:.1f} ms", ""),
    "added_ttft_p50_ms": ("added to the first token, p50", "{:.1f} ms", "under 3 ms"),
    "added_ttft_p99_ms": ("added to the first token, p99", "{:.1f} ms", "under 10 ms"),
    "chunks_per_s": ("chunks relayed each second", "{:,.0f}", ""),
    "gateway_busy": ("the gateway's share of a core meanwhile", "{:.0%}", ""),
    "chunks_per_cpu_s": ("chunks relayed for each second of CPU", "{:,.0f}", "20,000"),
    "cpu_ms_per_request": ("CPU of a request for one token, beside that", "{:.1f} ms", ""),
    "bytes_per_stream": ("memory of an open stream", "{:,.0f} bytes", "under 102,400 bytes"),
    "whole": ("answers that came whole, of those open at once", "{:,}", "all"),
    "problems": ("errors", "{:,}", "0"),
}


def told(figures: Mapping[str, Any]) -> Iterator[str]:
    """A line for each figure: a terminal breaks lines between words, however narrow it is."""
    for name, (what, form, goal) in FIGURES.items():
        yield f"{what}: {form.format(figures[name])}" + (f" (goal: {goal})" if goal else "")


def gateway(
    streams: Annotated[int, typer.Option(min=1, help="Open while first tokens are timed.")] = 200,
    rounds_per_s: Annotated[float, typer.Option(min=0.1, help="Of each stream.")] = 20.0,
    tokens_per_round: Annotated[int, typer.Option(min=1)] = 2,
    many: Annotated[int, typer.Option(min=1, help="Open at once, for memory and errors.")] = 2000,
    seconds: Annotated[float, typer.Option(min=1, help="Of the load.")] = 10.0,
    model: Annotated[str, typer.Option(help="Whose tokenizer the gateway gets.")] = "smollm2-135m",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", callback=writable, help="Write the figures there.")
    ] = None,
) -> None:
    """What the gateway costs over HTTP, between a scheduler and clients that cost next to nothing."""
    import asyncio  # `--help` needs none of these

    from laps_sd.gatewaybench.measure import Load, measure
    from laps_sd.supervise import GaveUp
    from worker_service.model_files import ModelError
    from worker_service.pull import pull

    try:
        load = Load(streams, rounds_per_s, tokens_per_round, many, seconds=seconds)
    except ValueError as error:
        hint = "--rounds-per-s, --tokens-per-round, --seconds"
        raise typer.BadParameter(str(error), param_hint=hint) from None
    try:
        figures = asyncio.run(measure(load, Path(pull(model))))
    except* (OSError, GaveUp, ModelError) as errors:
        typer.echo(f"laps-sd: {str(errors.exceptions[0]) or 'no answer in time'}", err=True)
        raise typer.Exit(1) from None
    for line in told(figures):
        terminal.console().print(line, highlight=False)
    if json_file is not None:
        record = {**figures, "rounds_per_s": rounds_per_s, "tokens_per_round": tokens_per_round}
        json_file.write_text(json.dumps({**record, "python": platform.python_version()}, indent=2) + "\n")
