"""A flood on real processes (`python -m tests.e2e.flood`): Redis, scheduler and gateway, before a worker that takes as
long as its costs say and knows no model. Told is what those see who are admitted, those who are refused, and what is
left of it afterwards.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Annotated, Any

import grpc
import psutil
import typer
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_fixed

from laps_sd.client import AsyncClient
from laps_sd.loadtest.drivers import run
from laps_sd.loadtest.plan import arrivals, plan, synthetic
from laps_sd.loadtest.record import Record
from laps_sd.loadtest.target import Server
from laps_sd.options import Options
from laps_sd.ports import claim_ports
from laps_sd.redis_server import own_redis
from laps_sd.schedbench import workers as peers
from laps_sd.stack import gateway_command, scheduler_command
from laps_sd.supervise import Child, leashed
from protos.v1 import types_pb2
from scheduler_service.sim.results import percentile
from tests.gateway.harness import model_info
from tests.waiting import until

SLOTS = 4
PROMPT_TOKENS, MAX_TOKENS = 24, 512
MEAN_TOKENS, SIGMA = 30.0, 0.8  # of an answer, log-normal
FLOOD = 10  # times the capacity
CALM_S = READY_S = 60.0
WORKER = "worker"


class Paced(peers.Worker):
    """A round takes `round_s`, and each answer ends where its id says: nobody else knows its length."""

    def __init__(self, target: str, round_s: float) -> None:
        super().__init__(target, 0, SLOTS)
        self._hello.model.CopyFrom(model_info(context_tokens=2 * MAX_TOKENS))
        self._hello.cost.Clear()
        self._hello.cost.verify_s = self.round_s = round_s
        self.go.set()

    async def serve(self) -> None:
        """Once somebody leads, until killed."""
        away = retry_if_exception_type(grpc.aio.AioRpcError)
        async for attempt in AsyncRetrying(retry=away, stop=stop_after_delay(READY_S), wait=wait_fixed(0.1)):
            with attempt:
                await self.run()

    def _obey(self, command: Any) -> None:
        super()._obey(command)
        for admit in command.admit:
            drawn = (
                Random(admit.request_id).lognormvariate(0.0, SIGMA) * MEAN_TOKENS / 1.377
            )  # its mean: exp(SIGMA^2/2)
            self._requests[admit.request_id].max_tokens = min(max(1, round(drawn)), MAX_TOKENS)

    def _round(self, command: Any, step: int) -> Any:
        report = super()._round(command, step)
        for row in report.rows:
            row.finish = types_pb2.FINISH_REASON_STOP if row.finish else 0
        return report


class Stack:
    def __init__(self, grpc: str, processes: dict[str, psutil.Process]) -> None:
        self.server = Server(grpc, chat=False, timeout_s=300.0)
        self.processes = processes

    def memory_mb(self) -> dict[str, float]:
        return {name: round(process.memory_info().rss / 2**20, 1) for name, process in self.processes.items()}

    def cpu_s(self) -> dict[str, float]:
        return {name: sum(process.cpu_times()[:2]) for name, process in self.processes.items()}


@asynccontextmanager
async def stack(policy: str, max_backlog_s: str, round_ms: float) -> AsyncIterator[Stack]:
    grpc_port, http_port, port = claim_ports(0, 0, 0)
    options = Options(policy=policy, max_backlog_s=max_backlog_s, log_level="warning", grpc_port=0, drain_s=0.0)
    target = f"127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as folder, own_redis(options, Path(folder)) as (url, redis):
        commands = [scheduler_command(options, port, url), gateway_command(options, grpc_port, http_port, target)]
        async with asyncio.TaskGroup() as tasks:
            children = [Child(command, sys.stderr.buffer.write) for command in (*redis, *commands)]
            for child in children:
                tasks.create_task(child.keep_running())
            worker = await asyncio.create_subprocess_exec(
                *leashed([sys.executable, "-m", __spec__.name, WORKER, target, str(round_ms)])
            )
            try:
                async with AsyncClient(f"127.0.0.1:{grpc_port}") as client:
                    await client.ready(READY_S)
                names = {"scheduler": children[-2], "gateway": children[-1], "redis": children[0]}
                yield Stack(f"127.0.0.1:{grpc_port}", {name: psutil.Process(each.pid) for name, each in names.items()})
            finally:
                with suppress(ProcessLookupError):
                    worker.kill()
                await worker.wait()
                for child in reversed(children):
                    await child.stop()


async def send(where: Stack, seconds: float, rate: float, seed: int) -> list[Record]:
    """Poisson arrivals."""
    count = max(1, round(seconds * rate))
    jobs = synthetic(count, PROMPT_TOKENS, 0)
    planned = plan(jobs, arrivals(count, rate, seed=seed), max_tokens=MAX_TOKENS, ignore_eos=False, warmup=0)
    records, _ = await run(where.server, planned)
    return records


async def at_once(where: Stack, count: int, concurrency: int) -> tuple[list[Record], float]:
    """A closed loop, and how many completed in a second."""
    jobs = synthetic(count, PROMPT_TOKENS, 0)
    planned = plan(jobs, [None] * count, max_tokens=MAX_TOKENS, ignore_eos=False, warmup=0)
    records, _ = await run(where.server, planned, concurrency=concurrency)
    took_s = max(record.end_s for record in records) - min(record.sent_s for record in records)
    return records, sum(record.completed for record in records) / took_s


def seen(records: Sequence[Record]) -> dict[str, Any]:
    """By those who were admitted, and by those who were not. Seconds; of refusals milliseconds."""
    done = [record for record in records if record.completed]
    refused = [record for record in records if record.error.startswith("RESOURCE_EXHAUSTED")]
    e2el, ttft = sorted(one.e2el_s for one in done), sorted(one.ttft_s for one in done)
    answered = sorted(1000 * (one.end_s - one.sent_s) for one in refused)
    return {
        "admitted": len(done), "refused": len(refused), "failed": len(records) - len(done) - len(refused),
        "e2el_s": {name: round(percentile(e2el, at), 2) for name, at in SHARES.items()},
        "ttft_s": {name: round(percentile(ttft, at), 2) for name, at in SHARES.items()},
        "refused_after_ms": {name: round(percentile(answered, at), 1) for name, at in SHARES.items()},
        "completed_per_s": round(len(done) / max(one.end_s for one in records), 2),
    }  # fmt: skip


SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


async def calm(where: Stack) -> float:
    """Seconds until nothing waits or runs."""
    clock = asyncio.get_running_loop().time
    began = clock()
    async with AsyncClient(where.server.at) as client:

        async def empty() -> bool:
            stats = await client.stats()
            return not stats.waiting + stats.running + stats.paused

        await until(empty, CALM_S)
    return round(clock() - began, 2)


async def refusals(where: Stack, seconds: float) -> dict[str, Any]:
    """How many one gateway and one scheduler answer, and what each costs them: far more is sent than is served."""
    before, clock = where.cpu_s(), asyncio.get_running_loop().time
    began = clock()
    records, _ = await at_once(where, round(seconds * 400), 256)
    took_s = clock() - began
    spent = {name: cpu_s - before[name] for name, cpu_s in where.cpu_s().items()}
    refused = sum(record.error.startswith("RESOURCE_EXHAUSTED") for record in records)
    return {
        "refusals_per_s": round(refused / took_s),
        "cpu_ms_each": {name: round(1000 * cpu_s / max(1, refused), 2) for name, cpu_s in spent.items()},
        "cpu_share": {name: round(cpu_s / took_s, 2) for name, cpu_s in spent.items()},
    }


async def measure(policy: str, max_backlog_s: str, round_ms: float, seconds: float) -> dict[str, Any]:
    async with stack(policy, max_backlog_s, round_ms) as where:
        _, capacity = await at_once(where, 200, 3 * SLOTS)
        busy = seen(await send(where, seconds, 0.9 * capacity, seed=1))
        await calm(where)
        memory = {"before": where.memory_mb()}
        flood = seen(await send(where, seconds, FLOOD * capacity, seed=2))
        memory["flooded"] = where.memory_mb()
        over_s = await calm(where)
        after = seen(await send(where, seconds, 0.9 * capacity, seed=1))
        await calm(where)
        memory["after"] = where.memory_mb()
        cost = await refusals(where, min(seconds, 20.0))
    return {
        "policy": policy, "max_backlog_s": max_backlog_s, "round_ms": round_ms, "seconds": seconds,
        "capacity_per_s": round(capacity, 2),
        "busy": busy, "flood": flood, "after": after, "empty_after_s": over_s, "memory_mb": memory,
        "p99_flood_over_busy": {
            name: round(flood[name]["p99"] / busy[name]["p99"], 2) for name in ("e2el_s", "ttft_s")
        },
        "refusals": cost,
    }  # fmt: skip


def main(
    policy: Annotated[str, typer.Option(help="As of `laps-sd up`.")] = "default",
    max_backlog_s: Annotated[str, typer.Option(help="As of `laps-sd up`.")] = "auto",
    round_ms: Annotated[
        float, typer.Option(min=1.0, help="Of the worker: longer ones need less of the machine.")
    ] = 25.0,
    seconds: Annotated[float, typer.Option(min=1.0, help="Of each phase: busy, flood, busy again.")] = 120.0,
) -> None:
    print(json.dumps(asyncio.run(measure(policy, max_backlog_s, round_ms, seconds)), indent=2))  # noqa: T201


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        asyncio.run(Paced(sys.argv[2], float(sys.argv[3]) / 1000).serve())
    else:
        typer.run(main)
