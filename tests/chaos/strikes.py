"""Carries faults out on a running stack, and sees to it that each of them ends. When they strike is faults.py."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import IO

import psutil

from tests.chaos.cluster import Cluster
from tests.chaos.faults import (
    BLACKHOLE,
    CUT,
    DELAY,
    DRAFTER,
    KILL,
    LEADER,
    LIE,
    PROCESSES,
    REDIS,
    RESTART,
    STANDBY,
    THROTTLE,
    Fault,
)
from tests.chaos.proxy import Proxy, Trouble
from tests.waiting import until

ALIVE_S = 10.0  # for a process that is just being started
MOST_AT_ONCE = 5
SIGNALS = {KILL: signal.SIGKILL, RESTART: signal.SIGTERM}
BOTH, UP, DOWN = frozenset({"up", "down"}), frozenset({"up"}), frozenset({"down"})


class Striker:
    """`struck` counts faults by name."""

    def __init__(self, cluster: Cluster, struck: Counter[str], log: IO[bytes]) -> None:
        self._cluster, self._struck, self._log = cluster, struck, log
        self._places = asyncio.Semaphore(MOST_AT_ONCE)
        self._last_leader = 0

    async def run(self, faults: Sequence[Fault], recovered: Callable[[], Awaitable[None]]) -> None:
        """Returns when all of them are over. `recovered` waits until the service has got over what struck so far."""
        async with asyncio.TaskGroup() as tasks:
            for fault in faults:
                if not fault.together:
                    await recovered()
                await asyncio.sleep(fault.after_s)
                await self._places.acquire()
                tasks.create_task(self._strike(fault), name=fault.name)

    async def _strike(self, fault: Fault) -> None:
        clock = asyncio.get_running_loop().time
        try:
            if fault.kind == LIE:
                self._log.write(f"{clock():.3f} chaos {fault}\n".encode())
                await _misled(self._cluster, fault)
            elif fault.target in (*PROCESSES, DRAFTER):
                name = await self._process(fault)
                self._log.write(f"{clock():.3f} chaos {fault.name}: {name}, {fault.lasts_s:.1f} s\n".encode())
                await self._signal(name, fault)
            else:
                proxies = self._cluster.proxies[fault.target]
                self._log.write(f"{clock():.3f} chaos {fault}\n".encode())
                await _disturb(proxies[fault.which % len(proxies)], fault)
            self._log.write(f"{clock():.3f} chaos over: {fault.name}\n".encode())
            self._struck[fault.name] += 1
        finally:
            self._places.release()

    async def _process(self, fault: Fault) -> str:
        """The name of whom it strikes."""
        if fault.target == REDIS:
            return REDIS
        if fault.target in (LEADER, STANDBY):
            leader = await self._cluster.leader()
            self._last_leader = self._last_leader if leader is None else leader
            return f"scheduler-{self._last_leader if fault.target == LEADER else 1 - self._last_leader}"
        return f"{fault.target}-{fault.which % len(self._cluster.named(fault.target))}"

    async def _signal(self, name: str, fault: Fault) -> None:
        process = await self._alive(name)
        if (number := SIGNALS.get(fault.kind)) is not None:
            with suppress(ProcessLookupError):  # of another fault, in this very moment
                os.kill(process.pid, number)
            return
        process.suspend()
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            if process.is_running():  # not another one of its number
                process.resume()

    async def _alive(self, name: str) -> psutil.Process:
        """Raises TimeoutError if it is not started in time."""

        async def alive() -> bool:
            return name in self._cluster.processes()

        await until(alive, ALIVE_S)
        return self._cluster.processes()[name]


async def _misled(cluster: Cluster, fault: Fault) -> None:
    assert cluster.drafter is not None
    mode = cluster.drafter.modes[int(fault.strength * len(cluster.drafter.modes))]
    cluster.drafter.mode.write_text(mode)
    try:
        await asyncio.sleep(fault.lasts_s)
    finally:
        cluster.drafter.mode.write_text("")


async def _disturb(proxy: Proxy, fault: Fault) -> None:
    if fault.kind == CUT:
        proxy.cut()
        return
    troubles = {
        DELAY: Trouble(delay_s=0.01 + 0.3 * fault.strength**2),
        THROTTLE: Trouble(bytes_per_s=2_000 + 60_000 * fault.strength),
        BLACKHOLE: Trouble(holds=(BOTH, UP, DOWN)[int(3 * fault.strength)]),
    }
    with proxy.troubled(troubles[fault.kind]):
        await asyncio.sleep(fault.lasts_s)
