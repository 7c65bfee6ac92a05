"""One answer of a running server, printed as it comes, or as JSON. Which answer is asked for is not known here."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from laps_sd.client import AsyncClient, BadInput, Chunk, Collector, Completion, Lost, NotServing, RequestError
from laps_sd.interrupt import INTERRUPTED
from laps_sd.reach import LISTENS_S, listens

Ask = Callable[[AsyncClient], AsyncIterator[Chunk]]


def show(
    server: str, api_key: str | None, ca: Path | None, ask: Ask, *, as_json: bool, stats: bool, after: str = ""
) -> None:
    """Prints the answer to stdout. `after`: the request outlives a pause of the service, and Ctrl-C. This is printed to
    stderr if the command ends before it. Raises typer.Exit."""
    begun = came = False

    async def answer(client: AsyncClient) -> AsyncIterator[Chunk]:
        nonlocal begun, came
        if after:  # the client itself would wait for half a minute
            await listens(server, api_key, ca, LISTENS_S)
        begun = True
        async for chunk in ask(client):
            came = came or bool(chunk.text)
            yield chunk

    def tell_after(condition: str = "") -> None:
        if after and begun:
            typer.echo(f"laps-sd: {condition}{after}", err=True)

    try:
        completion = asyncio.run(_stream(AsyncClient(server, api_key=api_key, ca=ca), answer, echo=not as_json))
    except RequestError as error:
        hint = " (use --raw for a model without a chat template)" if _lacks_template(error) else ""
        broken = "the answer was broken off: " if came else ""
        typer.echo(f"laps-sd: {broken}{error.code.name}: {error.message}{hint}", err=True)
        if isinstance(error, NotServing | Lost):  # others end the request as well
            tell_after("if the service has it, ")
        raise typer.Exit(1) from error
    if completion is None:
        tell_after()
        raise typer.Exit(INTERRUPTED)
    if as_json:
        present = {name: value for name, value in asdict(completion).items() if value is not None}
        typer.echo(json.dumps(present, ensure_ascii=False))
    if stats:
        _print_stats(completion)
    if completion.finish_reason == "cancelled":
        typer.echo("laps-sd: somebody cancelled the request before its answer was whole", err=True)
        raise typer.Exit(1)


async def _stream(client: AsyncClient, ask: Ask, *, echo: bool) -> Completion | None:
    """The answer, printed as it comes if `echo`. None: Ctrl-C was pressed; the connection is closed."""
    task = asyncio.ensure_future(_collect(client, ask, echo=echo))
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return None


async def _collect(client: AsyncClient, ask: Ask, *, echo: bool) -> Completion:
    collector = Collector()
    try:
        async with client:
            async for chunk in ask(client):
                collector.add(chunk)
                if echo:
                    print(chunk.text, end="", flush=True)
    finally:
        if echo and collector.text:
            print()
    return collector.completion()


def _lacks_template(error: RequestError) -> bool:
    return isinstance(error, BadInput) and error.message.startswith("chat: ") and "no chat template" in error.message


def _print_stats(completion: Completion) -> None:
    spec, timings = completion.spec_decode, completion.timings_ms
    rate = spec.num_accepted_tokens / spec.num_draft_tokens if spec.num_draft_tokens else 0.0
    tokens = completion.usage.completion_tokens
    rows = {
        "finish reason": completion.finish_reason,
        "tokens": f"{completion.usage.prompt_tokens} in, {tokens} out",
        "speculation": f"{spec.num_accepted_tokens} of {spec.num_draft_tokens} accepted ({rate:.0%}), "
        f"{spec.num_drafts} drafts",
        "queue": f"{timings.queue:.1f} ms",
        "first token": f"{timings.ttft:.1f} ms",
        "whole answer": f"{timings.e2el:.1f} ms",
        "preemptions": str(completion.preemptions),
    }
    table = Table(show_header=False, box=None)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    Console(stderr=True).print(table)
