"""`python -m tests.fuzz`: inputs by the hundred thousand, to every RPC of a real stack. None is made here."""

import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from laps_sd.stack import Options, Stack, claim_ports, gateway_command, run, worker_command
from laps_sd.supervise import Child
from protos.link.v1 import gateway_link_pb2
from protos.serving import channel
from tests.fuzz import impostor as other_side
from tests.fuzz.doors import STRANGERS, peers
from tests.fuzz.fuzzing import Harm, Watch, batch, knock
from tests.fuzz.impostor import Impostor
from tests.tiny_model import make_tiny_model

BATCH = 2000  # inputs at a door, on the average
TO_IMPOSTORS = 0.05  # of all inputs, those that a scheduler sends


@dataclass
class Fuzzing:
    """One run: the stack under fire, and beside it a worker and a gateway whose scheduler is an impostor."""

    options: Options
    seed: int
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    _worker_says: tuple[int, ...] = ()

    @property
    def inputs(self) -> int:
        return sum(map(Counter.total, self.counts.values()))

    def emit(self, line: bytes) -> None:
        Watch.line(self.complaints, line)

    async def doors(self, stack: Stack, watch: Watch, inputs: int, names: list[str]) -> None:
        scheduler = scheduler_of(stack)
        serving = await watch.serving(scheduler)
        doors = [(stack.grpc, door) for door in STRANGERS]
        doors += [(scheduler, door) for door in peers(serving.model.fingerprint)]
        doors = [(target, door) for target, door in doors if not names or door.name in names]
        shares, number = sum(door.share for _, door in doors), 0
        size = min(BATCH * len(doors), inputs) / shares
        while self.inputs < inputs:
            for target, door in doors:
                seen = await batch(door, target, f"{self.seed}/{number}", max(1, round(size * door.share)))
                self._count(door.name, seen)
                await watch.calm()
            number += 1
            typer.echo(f"{self.inputs} inputs, {memory_mib(stack.children)} MiB", err=True)

    async def impostors(self, serving: gateway_link_pb2.Serving, inputs: int) -> None:
        async with self._their_victims() as (impostor, gateway):
            number, begun = 0, self.inputs
            while self.inputs - begun < inputs:
                size = max(1, min(BATCH, inputs // 2))
                seen = await other_side.batch(impostor, f"{self.seed}/{number}", size, gateway, serving)
                self._count("to a worker", Counter(heard=seen["Attach"]))
                self._count("to a gateway", Counter(heard=seen["Link"]))
                says = await impostor.converse("Attach", other_side.worker_is_well)
                self._worker_says = self._worker_says or says
                if says != self._worker_says or self.complaints:
                    raise Harm(f"impostor, batch {self.seed}/{number}: {self.complaints or says}")
                number += 1
                typer.echo(f"{self.inputs} inputs", err=True)

    @asynccontextmanager
    async def _their_victims(self) -> AsyncIterator[tuple[Impostor, str]]:
        impostor = Impostor()
        scheduler = await impostor.start()
        grpc_port, http_port = claim_ports(0, 0)
        commands = (
            worker_command(self.options, 9, scheduler, Path(self.options.model)),
            gateway_command(self.options, grpc_port, http_port, scheduler),
        )
        children = [Child(command, self.emit) for command in commands]
        async with asyncio.TaskGroup() as tasks:
            for child in children:
                tasks.create_task(child.keep_running())
            try:
                yield impostor, f"127.0.0.1:{grpc_port}"
            finally:
                await impostor.stop()
                for child in children:
                    await child.stop()

    def _count(self, name: str, seen: Counter[str]) -> None:
        self.counts.setdefault(name, Counter()).update(seen)


async def fuzz(inputs: int, seed: int, names: list[str] | None = None) -> dict[str, Any]:
    """Inputs to the doors of these names; without names to every one, and some from an impostor. Raises Harm."""
    took: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        fuzzing = Fuzzing(options(Path(folder)), seed)

        async def use(stack: Stack) -> None:
            await stack.ready()
            fuzzing.complaints.clear()  # of the start
            watch = Watch(stack, fuzzing.complaints)
            await watch.calm()
            before, begun = memory_mib(stack.children), time.perf_counter()
            from_impostors = 0 if names else round(inputs * TO_IMPOSTORS)
            await fuzzing.doors(stack, watch, inputs - from_impostors, names or [])
            took.update(seconds=round(time.perf_counter() - begun), mib_before=before)
            took.update(mib_after=memory_mib(stack.children))
            if from_impostors:
                await fuzzing.impostors(await watch.serving(scheduler_of(stack)), from_impostors)
                await watch.calm()

        await run(fuzzing.options, use, fuzzing.emit)
    return {"inputs": fuzzing.inputs, "seed": seed, "statuses": fuzzing.counts, **took}


async def replay(name: str, seed: str) -> None:
    """One call again, as a complaint names it. Raises Harm."""
    with tempfile.TemporaryDirectory() as folder:

        async def use(stack: Stack) -> None:
            await stack.ready()
            watch, scheduler = Watch(stack, []), scheduler_of(stack)
            serving = await watch.serving(scheduler)
            for target, doors in ((stack.grpc, STRANGERS), (scheduler, peers(serving.model.fingerprint))):
                for door in doors:
                    if door.name == name:
                        async with channel(target) as link:
                            typer.echo(await knock(door, link, seed))
            await watch.calm()

        await run(options(Path(folder)), use)


def options(folder: Path) -> Options:
    model = str(make_tiny_model(folder / "model"))
    quiet = {"device": "cpu", "log_level": "warning", "grpc_port": 0, "http_port": 0}
    return Options(model=model, dtype="float32", drafter="ngram", **quiet)  # type: ignore[arg-type]


def scheduler_of(stack: Stack) -> str:
    """Its HOST:PORT, from the gateway's command line."""
    (gateway,) = (child for child in stack.children if child.name == "gateway")
    words = psutil.Process(gateway.pid).cmdline()
    return words[words.index("--scheduler") + 1]


def memory_mib(children: list[Child]) -> dict[str, int]:
    return {child.name: psutil.Process(child.pid).memory_info().rss >> 20 for child in children if child.pid}


def main(
    inputs: Annotated[int, typer.Option(min=1)] = 10_000,
    seed: int = 0,
    door: Annotated[list[str] | None, typer.Option(help="Service/Method; repeatable. Default: all.")] = None,
    again: Annotated[str | None, typer.Option(metavar="INPUT", help="Only this one, at the one --door.")] = None,
) -> None:
    """Ends at the first harm, with 1 and a line that says what was harmed, and by which input."""
    try:
        if again is not None:
            asyncio.run(replay((door or [""])[0], again))
        else:
            typer.echo(json.dumps(asyncio.run(fuzz(inputs, seed, door)), indent=2))
    except* Harm as harms:
        for harm in _leaves(harms):
            typer.echo(f"harm: {harm}", err=True)
        raise typer.Exit(1) from None


def _leaves(group: BaseExceptionGroup[Harm]) -> Iterator[BaseException]:
    for each in group.exceptions:
        if isinstance(each, BaseExceptionGroup):
            yield from _leaves(each)
        else:
            yield each


if __name__ == "__main__":
    typer.run(main)
