"""Two real scheduler processes on one Redis, and what one does to them. Each may run the code of another folder."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from laps_sd.stack import claim_ports
from protos.health import PLAINTEXT, is_serving
from scheduler_service.store import RedisStore
from tests.waiting import WAIT_S, until

LINK = "laps_sd.link.v1.GatewayLink"
ROOT = Path(__file__).parents[2]
STOP_S = 30.0


@dataclass
class SchedulerProcess:
    port: int
    arguments: tuple[str, ...]
    process: asyncio.subprocess.Process | None = None
    log: Path | None = None  # file for what it logs
    code: Path = ROOT  # the folder whose scheduler_service it runs from its next start on

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Returns when it is alive, in whatever role."""
        words = ("-m", "scheduler_service", "--standby", "--port", str(self.port), *self.arguments)
        path = {**os.environ, "PYTHONPATH": f"{self.code}{os.pathsep}{ROOT}"}
        with (self.log or Path(os.devnull)).open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, *words, cwd=self.code, env=path, stderr=log
            )

        async def alive() -> bool:
            return await self._answers("")

        await until(alive)

    async def leads(self) -> bool:
        return await self._answers(LINK)

    async def _answers(self, service: str) -> bool:
        return await asyncio.to_thread(is_serving, PLAINTEXT + self.target, service)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def stop(self) -> None:
        """SIGTERM; returns when it has ended."""
        assert self.process is not None
        self.process.terminate()
        async with asyncio.timeout(STOP_S):
            assert await self.process.wait() == 0

    async def kill(self) -> None:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def pair(
    redis_url: str, namespace: str, *more: str, lease_s: float = 3.0, logs: Path | None = None
) -> AsyncIterator[tuple[SchedulerProcess, SchedulerProcess]]:
    """The one that leads, and the one that stands by. On a busy machine a leader may stand still for longer than the
    default lease; for this one it does not. `logs`: folder for what they log."""
    arguments = ("--redis-url", redis_url, "--namespace", namespace, "--lease-s", str(lease_s), *more)
    store = RedisStore(redis_url, namespace=namespace, timeout_s=WAIT_S)
    await store.step_down(await store.lead(1))  # the first need not wait for the lease of a leader there never was
    await store.close()
    first, second = (
        SchedulerProcess(port, arguments, log=logs and logs / f"scheduler-{port}.log") for port in claim_ports(0, 0)
    )
    try:
        await first.start()
        await until(first.leads)
        await second.start()
        yield first, second
    finally:
        for each in (first, second):
            if each.process is not None:
                await each.kill()
