"""One cell of the bench: so many workers, waiting requests, tenants and gateways, and what they cost a scheduler."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from laps_sd.schedbench.gateways import Gateway, fill
from laps_sd.schedbench.processes import Processes, started, used_s
from laps_sd.schedbench.workers import Worker
from laps_sd.stack import Options
from protos.times import milliseconds

# Of the table: headings, and how a Cell fills them.
COLUMNS = {
    "workers": "{0.workers:,}",
    "waiting": "{0.waiting:,}",
    "tenants": "{0.tenants:,}",
    "gateways": "{0.gateways:,}",
    "commands / CPU s": "{0.commands_per_cpu_s:,.0f}",
    "rows / CPU s": "{0.rows_per_cpu_s:,.0f}",
    "tokens / CPU s": "{0.tokens_per_cpu_s:,.0f}",
    "busy": "{0.busy:.0%}",
    "peers": "{0.peers_busy:.0%}",
    "Redis": "{0.redis_share:.0%}",
    "p50, p99 ms": "{0.p50_ms:.1f}, {0.p99_ms:.1f}",
    "inside ms": "{0.inside_p50_ms:.1f}, {0.inside_p99_ms:.1f}",
    "bytes each": "{0.bytes_per_request:,.0f}",
}
LONGEST_OF = 8  # draws: a queue as it is after a while, when shorter requests have gone first
WARM_UP_S = 2.0  # at most; short measurements have short ones
CALM = 0.5  # of capacity: there delays are measured, since at capacity they are those of a queue


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a cell is made of."""

    workers: int
    waiting: int
    tenants: int = 1
    gateways: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell(Shape):
    """What a scheduler does with it.

    Rates are those at capacity. `commands_per_cpu_s`, `rows_per_cpu_s` and `tokens_per_cpu_s` are per second of the
    CPU time of the scheduler's process. A row is one request in one report; it counts when its tokens have reached a
    gateway, so its commit was durable. Delays are those at half of that rate: from a report sent by a worker to the
    command that has seen it, over gRPC both ways; `inside`: from the report read to the command handed to gRPC.
    """

    commands_per_s: float
    commands_per_cpu_s: float
    rows_per_cpu_s: float
    tokens_per_cpu_s: float
    rows_per_command: float
    ended_per_command: float  # requests; each is followed by another
    busy: float  # CPU seconds of the scheduler in a second
    peers_busy: float  # CPU seconds of this process in a second: near 1 its workers and gateways are the limit
    redis_share: float  # of the CPU time of scheduler and Redis
    p50_ms: float
    p99_ms: float
    max_ms: float
    inside_p50_ms: float
    inside_p99_ms: float
    bytes_per_request: float  # of the scheduler's memory
    redis_bytes_per_request: float


async def measure(shape: Shape, options: Options, slots: int, seconds: float) -> Cell:
    """Start a scheduler, serve until its predictor is warm, fill the queue, run at capacity, then at half of it.

    Raises ConnectionError, GaveUp or NoServer.
    """
    at_once, live = shape.workers * slots, shape.workers * slots + shape.waiting
    async with started(options, live) as processes, asyncio.TaskGroup() as tasks:
        workers = [Worker(processes.target, number, slots) for number in range(shape.workers)]
        gateways = [
            Gateway(processes.target, live, number, shape.tenants, shape.gateways) for number in range(shape.gateways)
        ]
        running = [tasks.create_task(worker.run()) for worker in workers]
        await asyncio.gather(*(worker.attached.wait() for worker in workers))
        running += [tasks.create_task(gateway.run()) for gateway in gateways]
        await fill(gateways, at_once)
        start(workers)
        await processes.learned()
        stop(workers)
        empty = processes.memory()
        await fill(gateways, live, draws=LONGEST_OF)
        bytes_each = [
            (full - none) / max(1, shape.waiting) for none, full in zip(empty, processes.memory(), strict=True)
        ]
        start(workers)
        await asyncio.sleep(min(WARM_UP_S, seconds))
        before = counts(processes, gateways)
        commands = len(await delays_s(workers, seconds))
        spent = counts(processes, gateways)
        spent.subtract(before)
        for worker in workers:
            worker.round_s = shape.workers * seconds / commands / CALM
        await asyncio.sleep(min(WARM_UP_S, seconds))
        delays = sorted(await delays_s(workers, seconds))
        inside = await processes.stats()
        for task in running:
            task.cancel()
    return Cell(
        **asdict(shape),
        commands_per_s=commands / spent["at_s"],
        commands_per_cpu_s=commands / spent["cpu_s"],
        rows_per_cpu_s=spent["rows"] / spent["cpu_s"],
        tokens_per_cpu_s=spent["tokens"] / spent["cpu_s"],
        rows_per_command=spent["rows"] / commands,
        ended_per_command=spent["ended"] / commands,
        busy=spent["cpu_s"] / spent["at_s"],
        peers_busy=spent["peers_s"] / spent["at_s"],
        redis_share=spent["redis_s"] / (spent["redis_s"] + spent["cpu_s"]),
        p50_ms=1000 * delays[len(delays) // 2],
        p99_ms=1000 * delays[int(0.99 * len(delays))],
        max_ms=1000 * delays[-1],
        inside_p50_ms=milliseconds(inside.report_to_command_p50),
        inside_p99_ms=milliseconds(inside.report_to_command_p99),
        bytes_per_request=bytes_each[0],
        redis_bytes_per_request=bytes_each[1],
    )


def counts(processes: Processes, gateways: Sequence[Gateway]) -> Counter[str]:
    """What has been used and has happened so far."""
    cpu_s, redis_s = processes.cpu_s()
    now: Any = {"at_s": time.perf_counter(), "cpu_s": cpu_s, "redis_s": redis_s, "peers_s": used_s(psutil.Process())}
    for name in ("rows", "tokens", "ended"):
        now[name] = sum(getattr(gateway, name) for gateway in gateways)
    return Counter(now)


def start(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.go.set()


def stop(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.go.clear()


async def delays_s(workers: Sequence[Worker], seconds: float) -> list[float]:
    """Of the next `seconds`: one for each command that answered a report. Raises ConnectionError if none came."""
    for worker in workers:
        worker.delays_s.clear()
    await asyncio.sleep(seconds)
    delays = [delay for worker in workers for delay in worker.delays_s]
    if not delays:
        raise ConnectionError("the scheduler answered no report")
    return delays
