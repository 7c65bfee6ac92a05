"""A whole stack in processes, with a proxy on every connection: started, asked how it is, stopped. No faults here."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO

import psutil

from laps_sd.client import AsyncClient
from laps_sd.redis_server import find_server, server_command
from laps_sd.stack import HOST, Options, claim_ports, gateway_command, scheduler_command, worker_command
from laps_sd.supervise import Child, Command
from protos.health import PLAINTEXT, is_serving
from tests.chaos.proxy import Proxy
from tests.waiting import until

SCHEDULERS = GATEWAYS = 2
READY_S = 300.0
STOP_S = 60.0
LINK = "laps_sd.link.v1.GatewayLink"


@dataclass(frozen=True)
class Drafter:
    """One of the stack's workers, in a process. `command`: of one at a port. It behaves as the file `mode` says, in one
    of `modes`; empty: well."""

    command: Callable[[int], Command]
    mode: Path
    modes: Sequence[str]


@dataclass
class Cluster:
    """`proxies` by link, such as `worker-scheduler`. `namespace`, `redis`: where Redis keeps what, and its socket.
    `metrics`: the ports of the workers' metrics, where there is a drafter."""

    children: dict[str, Child]
    proxies: dict[str, list[Proxy]]
    scheduler_ports: list[int]
    redis: Path
    namespace: str
    drafter: Drafter | None = None
    metrics: Sequence[int] = ()

    @property
    def targets(self) -> list[str]:
        """Of the gateways, through their proxies."""
        return [proxy.address for proxy in self.proxies["client-gateway"]]

    def client(self, first: int = 0) -> AsyncClient:
        """Of all gateways; the one of that number is asked first."""
        at = first % len(self.targets)
        return AsyncClient(",".join(self.targets[at:] + self.targets[:at]), max_retries=0)

    def named(self, prefix: str) -> list[Child]:
        return [child for name, child in self.children.items() if name.startswith(prefix)]

    async def leader(self) -> int | None:
        """The number of the scheduler that leads, if one says so."""
        asked = (asyncio.to_thread(is_serving, f"{PLAINTEXT}{HOST}:{port}", LINK) for port in self.scheduler_ports)
        return next((number for number, leads in enumerate(await asyncio.gather(*asked)) if leads), None)

    def processes(self) -> dict[str, psutil.Process]:
        """Those that run, by name."""
        found = {}
        for name, child in self.children.items():
            if child.pid is not None and psutil.pid_exists(child.pid):
                found[name] = psutil.Process(child.pid)
        return found


@asynccontextmanager
async def cluster(
    model: Path,
    log: IO[bytes],
    *,
    workers: int = 2,
    keep_s: int = 300,
    options: Options,
    drafter: Drafter | None = None,
) -> AsyncIterator[Cluster]:
    """Ready when yielded. `keep_s`: how long an ended request is kept. Raises a group with GaveUp of a child."""
    ports = claim_ports(*[0] * (SCHEDULERS + 2 * GATEWAYS))
    scheduler_ports, grpc_ports, http_ports = ports[:2], ports[2:4], ports[4:]
    options = replace(options, model=str(model), schedulers=SCHEDULERS, workers=workers)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="laps-sd-")))
        (folder / "redis").mkdir()
        socket = folder / "redis.sock"

        async def proxies(to: Iterable[int | Path]) -> list[Proxy]:
            made = [Proxy(partial(_connect, place)) for place in to]
            for proxy in made:
                await proxy.start()
                stack.callback(proxy.stop)
            return made

        metrics = claim_ports(*[0] * workers) if drafter else []
        drafter_port = claim_ports(0)[0] if drafter else 0
        to_drafter = await proxies([drafter_port] * len(metrics))
        to_redis = await proxies([socket] * SCHEDULERS)
        of_workers = [await proxies(scheduler_ports) for _ in range(workers)]
        of_gateways = [await proxies(scheduler_ports) for _ in range(GATEWAYS)]
        to_gateways = await proxies(grpc_ports)
        settings = {"LAPS_SD_SCHEDULER_KEEP_S": str(keep_s)}
        commands = {"redis": server_command(find_server(), folder / "redis", socket)}
        for number, port in enumerate(scheduler_ports):
            command = scheduler_command(options, port, f"redis://{to_redis[number].address}")
            commands[f"scheduler-{number}"] = replace(command, environment={**command.environment, **settings})
        for number, links in enumerate(of_workers):
            if drafter:
                options = replace(options, drafter=f"remote:{to_drafter[number].address}")
            command = worker_command(options, number, _addresses(links), model)
            told = ["--metrics-port", str(metrics[number])] if drafter else []
            commands[f"worker-{number}"] = replace(command, arguments=[*command.arguments, *told])
        if drafter:
            commands["drafter-0"] = drafter.command(drafter_port)
        for number, links in enumerate(of_gateways):
            command = gateway_command(options, grpc_ports[number], http_ports[number], _addresses(links))
            commands[f"gateway-{number}"] = command
        made = Cluster(
            {name: _child(name, command, log) for name, command in commands.items()},
            {
                "scheduler-redis": to_redis,
                "worker-scheduler": [proxy for links in of_workers for proxy in links],
                "gateway-scheduler": [proxy for links in of_gateways for proxy in links],
                "client-gateway": to_gateways,
                "worker-drafter": to_drafter,
            },
            scheduler_ports,
            socket,
            namespace="laps-sd",
            drafter=drafter,
            metrics=metrics,
        )
        async with asyncio.TaskGroup() as tasks:
            for name, child in made.children.items():
                tasks.create_task(child.keep_running(), name=name)
            try:
                await _ready(made)
                yield made
            finally:
                await _stop(made)


def _child(name: str, command: Command, log: IO[bytes]) -> Child:
    """Each line that it prints is in the log, its name in front."""
    clock = asyncio.get_running_loop().time
    return Child(replace(command, name=name), lambda line: log.write(f"{clock():.3f} {name} ".encode() + line))


async def _connect(place: int | Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if isinstance(place, Path):
        return await asyncio.open_unix_connection(place)
    return await asyncio.open_connection(HOST, place)


def _addresses(proxies: Iterable[Proxy]) -> str:
    return ",".join(proxy.address for proxy in proxies)


async def _ready(made: Cluster) -> None:
    """Every worker serves, and every gateway knows. Raises TimeoutError."""
    for target in made.targets:

        async def serves(target: str = target) -> bool:
            return await asyncio.to_thread(is_serving, PLAINTEXT + target, "laps_sd.v1.Inference")

        await until(serves, READY_S)

    async def all_work() -> bool:
        return len((await client.stats()).workers) == len(made.named("worker"))

    async with made.client() as client:
        await until(all_work, READY_S)


async def _stop(made: Cluster) -> None:
    """As `laps-sd up` does: gateways, workers, schedulers, Redis."""
    async with asyncio.timeout(STOP_S):
        for prefix in ("gateway", "worker", "drafter", "scheduler", "redis"):
            await asyncio.gather(*(child.stop() for child in made.named(prefix)))
