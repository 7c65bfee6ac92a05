"""The services that are measured, as processes of their own, and what they have used so far. No load lives here."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import psutil
from tenacity import AsyncRetrying, stop_after_delay, wait_fixed

from laps_sd.options import Options
from laps_sd.ports import HOST, claim_ports
from laps_sd.redis_server import own_redis
from laps_sd.scratch import scratch
from laps_sd.stack import scheduler_command
from laps_sd.supervise import Child, Command
from protos.health import PLAINTEXT, is_serving
from protos.link.v1.gateway_link_pb2_grpc import GatewayLinkStub
from protos.serving import channel
from protos.v1 import inference_pb2, status_pb2

READY_S = 120.0  # however busy the machine
SERVICE = "laps_sd.link.v1.WorkerLink"


@dataclass(frozen=True, slots=True)
class Processes:
    """A scheduler and its Redis. `target`: the scheduler's HOST:PORT."""

    target: str
    scheduler: psutil.Process
    redis: psutil.Process

    def cpu_s(self) -> tuple[float, float]:
        """CPU seconds so far, of the scheduler and of Redis."""
        return used_s(self.scheduler), used_s(self.redis)

    def memory(self) -> tuple[int, int]:
        """Resident bytes, of the scheduler and of Redis."""
        return self.scheduler.memory_info().rss, self.redis.memory_info().rss

    async def stats(self) -> status_pb2.StatsResponse:
        async with channel(self.target) as link:
            answer: status_pb2.StatsResponse = await GatewayLinkStub(link).Stats(inference_pb2.StatsRequest())
        return answer

    async def learned(self) -> bool:
        """Whether the predictor predicts from requests that ended."""
        return (await self.stats()).predictor.state == status_pb2.PREDICTOR_STATE_WARM


def used_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@asynccontextmanager
async def started(
    options: Options, live: int, *, watch: Sequence[str] = (), flags: Sequence[str] = ()
) -> AsyncIterator[Processes]:
    """A Redis and a scheduler of their own, with room for `live` requests. `watch`: words of a command that runs the
    scheduler's module in place of `python -m`. `flags`: more of the scheduler's. Raises ConnectionError, NoServer."""
    (port,) = claim_ports(0)
    with scratch() as folder, own_redis(options, folder) as (url, redis):
        command = under(watch, scheduler_command(options, port, url))
        bounds = ["--max-live", str(2 * live), "--max-live-tokens", str(10**12)]
        # Workers stand still while the queue fills. They have not failed.
        bounds += ["--step-timeout-s", "3600", "--worker-timeout-s", "3600"]
        command = replace(command, arguments=[*command.arguments, *bounds, *flags])
        async with children(*redis, command) as (redis_child, scheduler):
            await serving(f"{HOST}:{port}", SERVICE)
            yield Processes(f"{HOST}:{port}", psutil.Process(scheduler.pid), psutil.Process(redis_child.pid))


def under(watch: Sequence[str], command: Command) -> Command:
    """`python -P -m MODULE ...` with `watch` in place of its first three words, if there is any."""
    return replace(command, arguments=[*watch, *command.arguments[3:]]) if watch else command


@asynccontextmanager
async def children(*commands: Command) -> AsyncIterator[Sequence[Child]]:
    """The commands, kept running in this order until the block ends. Raises a group with GaveUp."""
    async with asyncio.TaskGroup() as tasks:
        running = [Child(command, lambda _: None) for command in commands]
        for child in running:
            tasks.create_task(child.keep_running())
        try:
            yield running
        finally:
            for child in reversed(running):
                await child.stop()


async def serving(target: str, service: str) -> None:
    """Returns once the service is ready there. Raises ConnectionError."""
    await until(lambda: asyncio.to_thread(is_serving, f"{PLAINTEXT}{target}", service), f"{service} does not serve")


async def until(reached: Callable[[], Awaitable[bool]], otherwise: str, within_s: float = READY_S) -> None:
    """Returns once that is reached. Raises ConnectionError with `otherwise`."""
    async for attempt in AsyncRetrying(stop=stop_after_delay(within_s), wait=wait_fixed(0.05), reraise=True):
        with attempt:
            if not await reached():
                raise ConnectionError(f"{otherwise} within {within_s:g} s")
