"""`laps-sd bench scheduler`: cells of workers and waiting requests, one after the other, and what each costs."""

import asyncio
import json
import platform
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.table import Table
from tenacity import AsyncRetrying, stop_after_delay, wait_fixed

from laps_sd import terminal
from laps_sd.redis_server import NoServer
from laps_sd.schedbench.peers import Gateway, Worker
from laps_sd.stack import HOST, Options, claim_ports, own_redis, scheduler_command
from laps_sd.supervise import Child, GaveUp
from protos.health import PLAINTEXT, is_serving
from protos.serving import channel
from protos.v1 import inference_pb2, types_pb2
from protos.v1.gateway_link_pb2_grpc import GatewayLinkStub

READY_S = 30.0
LEFT_OF = 8  # requests, the one that waits: of a queue as it is after a while, when shorter ones go first
SERVICE = "laps_sd.v1.WorkerLink"
WARM_UP_S = 2.0
CALM = 0.5  # of capacity, where delays are measured: at capacity they are those of a queue


@dataclass(frozen=True, slots=True)
class Cell:
    """What so many workers and waiting requests cost.

    Delays are those at half of the rate that was reached: from a report sent to the command that has seen it, both ways
    over gRPC; `inside`: from the report read to the command handed to gRPC.
    """

    workers: int
    waiting: int
    commands_per_s: float
    commands_per_cpu_s: float  # of the scheduler's main process
    ended_per_command: float  # requests, each followed by another
    redis_share: float  # of the CPU time of both
    p50_ms: float
    p99_ms: float
    max_ms: float
    inside_p50_ms: float
    inside_p99_ms: float
    bytes_per_request: float  # of the scheduler's memory
    redis_bytes_per_request: float


@dataclass(frozen=True, slots=True)
class Processes:
    """The two that are measured, and where the scheduler serves."""

    target: str
    scheduler: psutil.Process
    redis: psutil.Process

    def cpu_s(self) -> tuple[float, float]:
        """So far, of the scheduler and of Redis."""
        scheduler, redis = (process.cpu_times() for process in (self.scheduler, self.redis))
        return scheduler.user + scheduler.system, redis.user + redis.system

    def memory(self) -> tuple[int, int]:
        """Bytes."""
        return self.scheduler.memory_info().rss, self.redis.memory_info().rss


async def cell(workers: int, waiting: int, options: Options, slots: int, seconds: float) -> Cell:
    """Start both, serve until the predictor is warm, fill the queue, run at capacity, then at half of it. Raises
    ConnectionError, GaveUp or NoServer."""
    live = workers * slots + waiting
    async with started(options, live) as processes, asyncio.TaskGroup() as tasks:
        peers = [Worker(processes.target, number, slots) for number in range(workers)]
        gateway = Gateway(processes.target, seed=live)
        running = [tasks.create_task(peer.run()) for peer in peers]
        await asyncio.gather(*(peer.attached.wait() for peer in peers))
        running.append(tasks.create_task(gateway.run()))
        await gateway.fill(workers * slots)
        for peer in peers:
            peer.go.set()
        await learned(processes.target)
        for peer in peers:
            peer.go.clear()
        empty = processes.memory()
        await gateway.fill(live, draws=LEFT_OF)
        bytes_each = [(full - none) / max(1, waiting) for none, full in zip(empty, processes.memory(), strict=True)]
        for peer in peers:
            peer.go.set()
        await asyncio.sleep(WARM_UP_S)
        began, ended = processes.cpu_s(), gateway.ended
        commands = len(await delays_s(peers, seconds))
        cpu_s, redis_s = (after - before for before, after in zip(began, processes.cpu_s(), strict=True))
        ended = gateway.ended - ended
        for peer in peers:
            peer.round_s = workers * seconds / commands / CALM
        await asyncio.sleep(WARM_UP_S)
        delays = sorted(await delays_s(peers, seconds))
        inside = await stats(processes.target)
        for task in running:
            task.cancel()
    return Cell(
        workers=workers,
        waiting=waiting,
        commands_per_s=commands / seconds,
        commands_per_cpu_s=commands / cpu_s,
        ended_per_command=ended / commands,
        redis_share=redis_s / (redis_s + cpu_s),
        p50_ms=1000 * delays[len(delays) // 2],
        p99_ms=1000 * delays[int(0.99 * len(delays))],
        max_ms=1000 * delays[-1],
        inside_p50_ms=inside.report_to_command_p50_ms,
        inside_p99_ms=inside.report_to_command_p99_ms,
        bytes_per_request=bytes_each[0],
        redis_bytes_per_request=bytes_each[1],
    )


async def stats(target: str) -> types_pb2.ServerStats:
    async with channel(target) as link:
        answer: types_pb2.ServerStats = await GatewayLinkStub(link).Stats(inference_pb2.StatsRequest())
    return answer


async def learned(target: str) -> None:
    """Returns once lengths are predicted from what has ended. Raises ConnectionError."""
    async for attempt in AsyncRetrying(stop=stop_after_delay(READY_S), wait=wait_fixed(0.1), reraise=True):
        with attempt:
            if (await stats(target)).predictor.status != "warm":
                raise ConnectionError(f"the predictor has learned nothing within {READY_S:g} s")


async def delays_s(peers: Sequence[Worker], seconds: float) -> list[float]:
    """Of the next `seconds`: one for each command that answered a report."""
    for peer in peers:
        peer.delays_s.clear()
    await asyncio.sleep(seconds)
    delays = [delay for peer in peers for delay in peer.delays_s]
    if not delays:
        raise ConnectionError("the scheduler answered no report")
    return delays


@asynccontextmanager
async def started(options: Options, live: int) -> AsyncIterator[Processes]:
    """A Redis and a scheduler of their own, on which `live` requests fit."""
    (port,) = claim_ports(0)
    with tempfile.TemporaryDirectory(prefix="laps-sd-") as folder, own_redis(options, Path(folder)) as (url, redis):
        command = scheduler_command(options, port, url)
        bounds = ["--max-live", str(2 * live), "--max-live-tokens", str(10**12)]
        # Workers stand still while the queue fills, and have not failed.
        bounds += ["--step-timeout-s", "3600", "--worker-timeout-s", "3600"]
        command = replace(command, arguments=[*command.arguments, *bounds])
        async with asyncio.TaskGroup() as tasks:
            children = [Child(each, lambda _: None) for each in (*redis, command)]
            for child in children:
                tasks.create_task(child.keep_running())
            try:
                async for attempt in AsyncRetrying(stop=stop_after_delay(READY_S), wait=wait_fixed(0.05), reraise=True):
                    with attempt:
                        if not await asyncio.to_thread(is_serving, f"{PLAINTEXT}{HOST}:{port}", SERVICE):
                            raise ConnectionError(f"the scheduler does not serve within {READY_S:g} s")
                redis_process, scheduler = (psutil.Process(child.pid) for child in children)
                yield Processes(f"{HOST}:{port}", scheduler, redis_process)
            finally:
                for child in reversed(children):
                    await child.stop()


def table(cells: Sequence[Cell]) -> Table:
    drawn = Table("workers", "waiting", "commands / CPU s", "commands / s", "ended / command", "Redis")
    for name in ("p50 ms", "p99 ms", "max ms", "inside p50 ms", "inside p99 ms", "KiB / request", "in Redis"):
        drawn.add_column(name)
    for column in drawn.columns:
        column.justify = "right"
    for one in cells:
        drawn.add_row(
            f"{one.workers}",
            f"{one.waiting:,}",
            f"{one.commands_per_cpu_s:,.0f}",
            f"{one.commands_per_s:,.0f}",
            f"{one.ended_per_command:.2f}",
            f"{one.redis_share:.0%}",
            *(f"{ms:.1f}" for ms in (one.p50_ms, one.p99_ms, one.max_ms, one.inside_p50_ms, one.inside_p99_ms)),
            f"{one.bytes_per_request / 1024:.1f}",
            f"{one.redis_bytes_per_request / 1024:.1f}",
        )
    return drawn


def scheduler(
    workers: Annotated[list[int] | None, typer.Option(min=1, help="Repeatable. Default: 1, 4, 16, 64.")] = None,
    waiting: Annotated[list[int] | None, typer.Option(min=0, help="Repeatable. Default: 100 to 100,000.")] = None,
    slots: Annotated[int, typer.Option(min=1, help="Of each worker.")] = 32,
    seconds: Annotated[float, typer.Option(min=0.5, help="Of each of a cell's two measurements.")] = 10.0,
    policy: Annotated[str, typer.Option(help="As of `laps-sd up`.")] = "default",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE")] = None,
) -> None:
    """The scheduler and its Redis alone, between workers and a gateway that cost next to nothing.

    At capacity: commands for each second of the scheduler's CPU time. At half of it: how long a worker waits for one.
    """
    options, cells = Options(policy=policy, max_backlog_s="inf", log_level="warning", grpc_port=0), []
    try:
        for many in waiting or [100, 1_000, 10_000, 100_000]:
            for count in workers or [1, 4, 16, 64]:
                cells.append(asyncio.run(cell(count, many, options, slots, seconds)))
                typer.echo(f"{count} workers, {many} waiting: {cells[-1].commands_per_cpu_s:.0f}", err=True)
    except* (ConnectionError, GaveUp, NoServer, TimeoutError) as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        typer.echo(f"laps-sd: {first}", err=True)
        raise typer.Exit(1) from None
    terminal.console().print(table(cells))
    if json_file is not None:
        made = {"slots": slots, "seconds": seconds, "policy": policy, "python": platform.python_version()}
        json_file.write_text(json.dumps({**made, "cells": [asdict(one) for one in cells]}, indent=2) + "\n")
