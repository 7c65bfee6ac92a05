"""`python -m tests.chaos`: rounds of faults on a real stack under load, until as many have struck as were asked for.

A round has a seed, which draws its faults and its load. Its counts go to a file of JSON lines; one that finds something
keeps its logs, and says how to repeat its schedule.
"""

import asyncio
import itertools
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from laps_sd.stack import Options, find_model
from laps_sd.supervise import GaveUp
from tests.chaos import record
from tests.chaos.book import Book
from tests.chaos.cluster import Cluster, cluster
from tests.chaos.faults import schedule
from tests.chaos.leftovers import leftovers
from tests.chaos.load import STREAM_S, Load, Tally
from tests.chaos.strikes import Striker
from tests.tiny_model import make_tiny_model

TINY = "tiny"
RECOVER_S = 120.0  # after a fault, until somebody gets a token again
PER_FAULT_S = 60.0  # a round that takes longer hangs

# Memory for a few texts only: requests lose their KV without any fault, too.
OPTIONS = Options(dtype="float32", device="cpu", slots=4, kv_tokens=2048, drain_s=3.0, max_backlog_s="inf")
TINY_TEXTS: dict[str, Any] = {"tokens": 600}
TEXTS: dict[str, Any] = {"tokens": 48, "prompts": 4}


async def one_round(
    name: str, model: Path, book: Book, seed: int, faults: int, users: int, log: Path
) -> dict[str, Any]:
    """What is recorded of it."""
    began = time.monotonic()
    tally, struck, found = Tally(), Counter[str](), []
    with log.open("wb", buffering=0) as lines:
        try:
            async with cluster(model, lines, options=OPTIONS) as made:
                await disturb(
                    made, Load(book, made.client, seed, tally), Striker(made, struck, lines), seed, faults, users
                )
                found = [f"left: {what}" for what in await leftovers(made)]
        except* (TimeoutError, GaveUp) as failed:
            found = [f"the stack did not recover: {error!r}" for error in failed.exceptions]
    return {
        "model": name,
        "seed": seed,
        "commit": record.commit(),
        "duration_s": round(time.monotonic() - began, 1),
        "faults": dict(sorted(struck.items())),
        "streams": dict(sorted(tally.streams.items())),
        "tokens": tally.tokens,
        "errors": dict(sorted(tally.errors.items())),
        "retries": tally.retries,
        **tally.longest(),
        "violations": tally.violations + found,
    }


async def disturb(made: Cluster, load: Load, striker: Striker, seed: int, faults: int, users: int) -> None:
    """All faults of a seed under load, then the end of all streams. Raises TimeoutError."""
    running = asyncio.create_task(load.run(users))
    try:
        async with asyncio.timeout(faults * PER_FAULT_S + STREAM_S):
            await load.flows(RECOVER_S)
            await striker.run(schedule(seed, faults), lambda: load.flows(RECOVER_S))
            load.end()
            await running
    finally:
        running.cancel()
        await asyncio.wait([running])


def main(
    faults: Annotated[
        int, typer.Option(min=1, help="In all, those in FILE included; with --seed: in its round.")
    ] = 1000,
    per_round: Annotated[int, typer.Option(min=1)] = 50,
    seed: Annotated[list[int] | None, typer.Option(help="Only the round of this seed, again; repeatable.")] = None,
    model: Annotated[str, typer.Option(help="tiny, or as in `laps-sd pull`.")] = TINY,
    users: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 16,
    file: Annotated[Path, typer.Option(help="Counts of all rounds, as JSON lines.")] = Path("build/chaos/runs.jsonl"),
    logs: Path = Path("build/chaos"),
) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_model(Path(folder)) if model == TINY else asyncio.run(find_model(model))
        book = Book(path, **(TINY_TEXTS if model == TINY else TEXTS))
        print(f"{len(book.texts)} texts of {sum(len(text.tokens) for text in book.texts)} tokens")
        if seed:
            played = [play(model, path, book, each, faults, users, file, logs) for each in seed]
            sys.exit(not all(played))
        first = 1 + max((run["seed"] for run in record.runs(file, model)), default=0)
        good = True
        for number in itertools.count(first):
            left = faults - record.struck(record.runs(file, model))
            if left <= 0:
                break
            good &= play(model, path, book, number, min(left, per_round), users, file, logs)
    for name, value in record.totals(record.runs(file, model)).items():
        print(f"{name}: {value}")
    sys.exit(not good)


def play(model: str, path: Path, book: Book, seed: int, faults: int, users: int, file: Path, logs: Path) -> bool:
    """A round, told and recorded. Whether nothing was found."""
    log = logs / f"{model}-{seed}.log"
    began = time.monotonic()
    run = asyncio.run(one_round(model, path, book, seed, faults, users, log))
    record.append(file, run)
    streams = sum(run["streams"].values())
    took = f"{time.monotonic() - began:.0f} s"
    print(f"seed {seed}: {record.struck([run])} faults, {streams} streams, {run['tokens']} tokens, {took}", flush=True)
    if not run["violations"]:
        log.unlink()
        return True
    for violation in run["violations"]:
        print(f"  {violation}")
    again = f"python -m tests.chaos --model {model} --seed {seed} --faults {faults} --users {users}"
    print(f"  logs: {log}; again: {again}", flush=True)
    return False


if __name__ == "__main__":
    typer.run(main)
