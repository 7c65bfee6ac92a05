"""One cell of the bench: so many workers, waiting requests, tenants and gateways, and what they cost a scheduler."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from laps_sd.options import Options
from laps_sd.schedbench.gateways import Gateway, fill
from laps_sd.schedbench.peers import running, start, stop
from laps_sd.schedbench.processes import Processes, started, until, used_s
from laps_sd.schedbench.workers import Worker
from protos.times import milliseconds
from scheduler_service.counters import MAX_DELAYS

LONGEST_OF = 8  # draws: a queue as it is after a while, when shorter requests have gone first
QUIET_S = 10.0  # without a command: the scheduler is gone
WARM_UP_S = 2.0  # at most; short measurements have short ones
REST_S = 0.3  # no row for so long: none is on its way
CALM = 0.5  # of capacity: there delays are measured, since at capacity they are those of a queue


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a cell is made of."""

    workers: int
    waiting: int
    tenants: int = 1
    gateways: int = 1


async def measure(shape: Shape, options: Options, slots: int, seconds: float) -> dict[str, Any]:
    """Start a scheduler, serve until its predictor is warm, fill the queue, run at capacity, then at half of it.

    A row is one request in one report; it counts when its tokens have reached a gateway, so its commit was durable.
    Delays are those at half of the capacity: from a report sent by a worker to the command that has seen it, over gRPC
    both ways; inside: from the report read to the command handed to gRPC.

    Raises ConnectionError, GaveUp or NoServer.
    """
    at_once, live = shape.workers * slots, shape.workers * slots + shape.waiting
    async with started(options, live) as processes:
        workers = [Worker(processes.target, number, slots) for number in range(shape.workers)]
        gateways = [
            Gateway(processes.target, live, number, shape.tenants, shape.gateways) for number in range(shape.gateways)
        ]
        async with running(workers, gateways):
            await fill(gateways, at_once)
            start(workers)
            await until(processes.learned, "the predictor has learned nothing")
            stop(workers)
            empty = processes.memory()
            await fill(gateways, live, draws=LONGEST_OF)
            full = processes.memory()
            start(workers)
            await asyncio.sleep(min(WARM_UP_S, seconds))
            before = counts(processes, workers, gateways)
            commands = len(await delays_s(workers, seconds))
            spent = counts(processes, workers, gateways)
            spent.subtract(before)
            stop(workers)
            await until(lambda: at_rest(gateways), "what was reported did not all become durable")
            for worker in workers:
                worker.round_s = shape.workers * spent["at_s"] / commands / CALM
            start(workers)
            await asyncio.sleep(min(WARM_UP_S, seconds))
            delays = sorted(await delays_s(workers, seconds, least=MAX_DELAYS))  # its own percentiles are of so many
            inside = await processes.stats()
    return asdict(shape) | {
        "commands_per_s": commands / spent["at_s"],
        # These are for each second of the CPU time of the scheduler's process.
        "commands_per_cpu_s": commands / spent["cpu_s"],
        "rows_per_cpu_s": spent["rows"] / spent["cpu_s"],
        "tokens_per_cpu_s": spent["tokens"] / spent["cpu_s"],
        "rows_per_command": spent["rows"] / commands,
        "stored_share": spent["rows"] / spent["reported"],  # below 1 ever more rows wait for the store
        "ended_per_command": spent["ended"] / commands,  # requests; each is followed by another
        "busy": spent["cpu_s"] / spent["at_s"],
        "peers_busy": spent["peers_s"] / spent["at_s"],  # this process: near 1 its workers and gateways are the limit
        "redis_share": spent["redis_s"] / (spent["redis_s"] + spent["cpu_s"]),  # of the CPU time of both
        "p50_ms": 1000 * delays[len(delays) // 2],
        "p99_ms": 1000 * delays[int(0.99 * len(delays))],
        "max_ms": 1000 * delays[-1],
        "inside_p50_ms": milliseconds(inside.report_to_command_p50),
        "inside_p99_ms": milliseconds(inside.report_to_command_p99),
        "bytes_per_request": (full[0] - empty[0]) / max(1, shape.waiting),  # of the scheduler's memory
        "redis_bytes_per_request": (full[1] - empty[1]) / max(1, shape.waiting),
    }


def counts(processes: Processes, workers: Sequence[Worker], gateways: Sequence[Gateway]) -> Counter[str]:
    """What has been used and has happened so far."""
    cpu_s, redis_s = processes.cpu_s()
    now: Any = {"at_s": time.perf_counter(), "cpu_s": cpu_s, "redis_s": redis_s, "peers_s": used_s(psutil.Process())}
    for name in ("rows", "tokens", "ended"):
        now[name] = sum(getattr(gateway, name) for gateway in gateways)
    now["reported"] = sum(worker.reported for worker in workers)
    return Counter(now)


async def at_rest(gateways: Sequence[Gateway]) -> bool:
    """Whether nothing reaches them any more: all that workers have reported is durable."""
    rows = sum(gateway.rows for gateway in gateways)
    await asyncio.sleep(REST_S)
    return rows == sum(gateway.rows for gateway in gateways)


async def delays_s(workers: Sequence[Worker], seconds: float, least: int = 1) -> list[float]:
    """Of the next `seconds`, and longer until there are so many: one for each command that answered a report. Raises
    ConnectionError if none comes for QUIET_S."""
    for worker in workers:
        worker.delays_s.clear()
    delays: list[float] = []
    quiet_since = time.monotonic()
    while True:
        await asyncio.sleep(seconds)
        before, delays = len(delays), [delay for worker in workers for delay in worker.delays_s]
        if len(delays) >= least:
            return delays
        if len(delays) > before:
            quiet_since = time.monotonic()
        elif time.monotonic() - quiet_since > QUIET_S:
            raise ConnectionError("the scheduler answered no report")
