"""`python -m tests.chaos.soak`: steady load on a whole stack for minutes or hours; memory and open files of every
process as curves, and how much they grew. Every stream is checked, as under faults."""

import asyncio
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import psutil
import typer

from laps_sd.stack import Options
from scheduler_service.sim.drawing import figure, svg
from tests.chaos.book import Book
from tests.chaos.cluster import Cluster, cluster
from tests.chaos.leftovers import leftovers
from tests.chaos.load import Load, Tally
from tests.tiny_model import make_tiny_model

OPTIONS = Options(dtype="float32", device="cpu", slots=4, kv_tokens=2048, drafter="ngram", max_backlog_s="inf")
KEEP_S = 60  # requests that ended are in Redis for so long: then as many go as come
TEXT_TOKENS = 300
EDGE = 0.1  # share of the samples whose median is the beginning, or the end
MB = 1 << 20
RSS, FILES = "rss_mb", "files"


@dataclass
class Curves:
    """By process, a sample every `every_s`; `begins`: the first one after the warm-up."""

    every_s: float
    begins: int
    of: dict[str, dict[str, list[float | None]]] = field(default_factory=dict)  # None: it was not there
    taken: int = 0

    def sample(self, processes: dict[str, psutil.Process]) -> None:
        for name in processes:
            self.of.setdefault(name, {RSS: [None] * self.taken, FILES: [None] * self.taken})
        for name, curves in self.of.items():
            rss, files = _usage(processes.get(name))
            curves[RSS].append(rss)
            curves[FILES].append(files)
        self.taken += 1

    def growth(self, name: str, what: str) -> float:
        """Share by which the end is above the beginning."""
        samples = [sample for sample in self.of[name][what][self.begins :] if sample is not None]
        edge = max(1, round(EDGE * len(samples)))
        return median(samples[-edge:]) / median(samples[:edge]) - 1 if samples else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            name: {**curves, **{f"{what}_growth": round(self.growth(name, what), 4) for what in curves}}
            for name, curves in sorted(self.of.items())
        }


def _usage(process: psutil.Process | None) -> tuple[float | None, int | None]:
    try:
        return (round(process.memory_info().rss / MB, 2), process.num_fds()) if process else (None, None)
    except psutil.NoSuchProcess:  # a training process may end at any time
        return None, None


async def soak(made: Cluster, load: Load, curves: Curves, minutes: float, users: int) -> None:
    """Raises ChildProcessError if a process did not live through it."""
    clock = asyncio.get_running_loop().time
    began, pids = clock(), {name: child.pid for name, child in made.children.items()}
    running = asyncio.create_task(load.run(users))
    while clock() < began + 60 * minutes:
        await asyncio.wait([running], timeout=curves.every_s)
        curves.sample({**made.processes(), **_trainers(made)})
    load.end()
    await running
    if pids != {name: child.pid for name, child in made.children.items()}:
        raise ChildProcessError("a process died")


def _trainers(made: Cluster) -> dict[str, psutil.Process]:
    """The processes in which schedulers fit their models."""
    return {
        f"trainer of {name}": child
        for name, process in made.processes().items()
        if name.startswith("scheduler")
        for child in process.children()
    }


def draw(result: dict[str, Any]) -> str:
    """An SVG: memory above, open files below."""
    drawn, axes = figure(rows=2)
    for axis, what, title in zip(axes, (RSS, FILES), ("resident memory, MB", "open files"), strict=True):
        for name, curves in result["processes"].items():
            minutes = [result["every_s"] * (i + 1) / 60 for i in range(len(curves[what]))]
            axis.plot(minutes, curves[what], label=f"{name} {curves[f'{what}_growth']:+.1%}", linewidth=1)
        axis.axvline(result["warm_up_minutes"], color="#999", linewidth=0.7, linestyle=":")
        axis.set_ylabel(title)
        axis.set_ylim(bottom=0)
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize="small")
    axes[-1].set_xlabel("minutes")
    return svg(drawn)


async def run(model: Path, minutes: float, warm_up: float, users: int, every_s: float, log: Path) -> dict[str, Any]:
    book = Book(model, TEXT_TOKENS)
    curves = Curves(every_s, begins=round(60 * warm_up / every_s))
    with log.open("wb", buffering=0) as lines:
        async with cluster(model, lines, keep_s=KEEP_S, options=OPTIONS) as made:
            load = Load(book, made.client, 1, Tally())
            await soak(made, load, curves, minutes, users)
            left = await leftovers(made)
    return {
        "minutes": minutes,
        "warm_up_minutes": warm_up,
        "every_s": every_s,
        "streams": dict(load.tally.streams),
        "tokens": load.tally.tokens,
        "errors": dict(load.tally.errors),
        "violations": load.tally.violations + left,
        "processes": curves.as_dict(),
    }


def main(
    minutes: Annotated[float, typer.Option(min=1)] = 60.0,
    warm_up: Annotated[float, typer.Option(help="Minutes that growth does not count.")] = 5.0,
    users: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 6,
    every_s: Annotated[float, typer.Option(min=0.1, help="Between two samples.")] = 10.0,
    most: Annotated[float, typer.Option(help="Growth of any process's memory that is too much, in percent.")] = 5.0,
    json_file: Annotated[Path, typer.Option("--json")] = Path("build/soak/soak.json"),
    svg_file: Annotated[Path, typer.Option("--svg")] = Path("build/soak/soak.svg"),
) -> None:
    json_file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder))
        result = asyncio.run(run(model, minutes, warm_up, users, every_s, json_file.with_suffix(".log")))
    json_file.write_text(json.dumps(result) + "\n")
    svg_file.write_text(draw(result))
    print(f"{result['streams']}, {result['tokens']} tokens in {minutes:g} minutes")
    for name, curves in result["processes"].items():
        for what in (RSS, FILES):
            last = next((sample for sample in reversed(curves[what]) if sample is not None), 0)
            print(f"{name:24} {what:8} {last:8g} {curves[f'{what}_growth']:+.1%}")
    too_much = [name for name, curves in result["processes"].items() if curves[f"{RSS}_growth"] > most / 100]
    for problem in [*result["violations"], *(f"{name} grew more than {most:g} %" for name in too_much)]:
        print(problem)
    sys.exit(bool(result["violations"] or too_much))


if __name__ == "__main__":
    typer.run(main)
