"""Drivers, each of which sends its share of the requests, in this process or in another. Nothing is measured here.

`python -m laps_sd.loadtest.drivers` is a driver's process. It reads its share and then the start time, as JSON lines,
and writes its running totals and its records.
"""

import asyncio
import json
import resource
import sys
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict
from typing import Any, Self, TypeVar

from laps_sd.client import AsyncClient
from laps_sd.loadtest.driver import drive
from laps_sd.loadtest.openai import OpenAI
from laps_sd.loadtest.plan import Planned, Words
from laps_sd.loadtest.record import Record, Tally
from laps_sd.loadtest.target import Grpc, Refused, Server, Target
from laps_sd.loadtest.timeline import Timeline
from laps_sd.supervise import leashed

TALLY_EVERY_S = 0.2
START_S = 60.0  # for a process to start
LEAD_S = 0.2  # from telling the processes the start time until that time, so that all have read it
MOST_LINE_BYTES = 64 << 20  # of one record

T = TypeVar("T")


class DriverFailed(Exception):
    """A driver process ended before it had written all its records; it has printed the reason to stderr."""


class Driver(AbstractAsyncContextManager["Driver"]):
    """Sends its share of a plan. `tally`: its totals up to now."""

    def __init__(self, server: Server, share: Sequence[Planned], concurrency: int | None) -> None:
        self.tally = Tally()
        self._server, self._share, self._concurrency = server, share, concurrency

    @abstractmethod
    async def ready(self) -> None:
        """Returns when the server answers. Raises Refused."""

    @abstractmethod
    async def run(self, start: float) -> list[Record]:
        """`start`: of the machine's monotonic clock."""


class Local(Driver):
    """In this process."""

    async def __aenter__(self) -> Self:
        raise_file_limit()
        self._target = target(self._server)
        await self._target.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._target.__aexit__(*error)

    async def ready(self) -> None:
        await self._target.ready()

    async def run(self, start: float) -> list[Record]:
        return await drive(self._share, self._target, start=start, tally=self.tally, concurrency=self._concurrency)


class Process(Driver):
    """In a process of its own."""

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *leashed([sys.executable, "-P", "-m", __name__]),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MOST_LINE_BYTES,
            start_new_session=True,  # Ctrl-C reaches this process alone, which ends its drivers
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.communicate(b"")  # reads its pipes to their end

    async def ready(self) -> None:
        share = [asdict(planned) for planned in self._share]
        await self._tell({"server": asdict(self._server), "plan": share, "concurrency": self._concurrency})
        async with asyncio.timeout(START_S + self._server.ready_s):
            if refusal := (await self._hear())["refusal"]:
                raise Refused(refusal)

    async def run(self, start: float) -> list[Record]:
        await self._tell({"start": start})
        records: list[Record] = []
        while len(records) < len(self._share):
            said = await self._hear()
            if "tally" in said:
                self.tally = Tally(**said["tally"])
            else:
                records.append(Record(**said["record"]))
        return records

    async def _tell(self, what: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(ConnectionError):  # its process has ended, which `_hear` notices
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            await self._process.stdin.drain()

    async def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not (line := await self._process.stdout.readline()):
            raise DriverFailed("a driver process ended early")
        said: dict[str, Any] = json.loads(line)
        return said


def target(server: Server) -> Target:
    return Grpc(server) if server.model is None else OpenAI(server)


async def run(
    server: Server,
    plan: Sequence[Planned],
    *,
    concurrency: int | None = None,
    drivers: int = 1,
    stats: AsyncClient | None = None,
    watch: Callable[[Callable[[], Tally]], None] = lambda tally: None,
) -> tuple[list[Record], Timeline]:
    """Send `plan` and wait for every answer; meanwhile ask `stats`, a client, for the server's own figures.

    `watch` is called at the start with a function that returns the totals of all drivers. Raises Refused, DriverFailed.
    """
    timeline = Timeline()
    async with AsyncExitStack() as stack:
        every = [
            await stack.enter_async_context((Local if drivers == 1 else Process)(server, share, cap))
            for share, cap in shares(plan, concurrency, drivers)
        ]
        await _all(driver.ready() for driver in every)
        clock = asyncio.get_running_loop().time
        start = clock() + (LEAD_S if drivers > 1 else 0.0)
        watch(lambda: sum((driver.tally for driver in every), Tally()))
        if stats is not None:
            await stack.enter_async_context(_in_background(timeline.watch(stats, lambda: clock() - start)))
        parts = await _all(driver.run(start) for driver in every)
    return sorted((record for part in parts for record in part), key=lambda record: record.index), timeline


def shares(
    plan: Sequence[Planned], concurrency: int | None, drivers: int
) -> list[tuple[Sequence[Planned], int | None]]:
    """For each driver: every `drivers`-th request, and its part of the cap, the parts as equal as can be. There may be
    no more drivers than requests, and than the cap allows."""
    parts = range(drivers)
    caps = [None if concurrency is None else concurrency // drivers + (i < concurrency % drivers) for i in parts]
    return [(plan[i::drivers], caps[i]) for i in parts]


async def _all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What each coroutine returns. If one raises, the others are cancelled and its exception is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as raised:
        raise raised.exceptions[0] from raised
    return [task.result() for task in tasks]


@asynccontextmanager
async def _in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def raise_file_limit() -> None:
    """Each connection is an open file, and the usual limit of 1024 is too low."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _as_process() -> None:
    given = json.loads(sys.stdin.readline())
    server = Server(**{**given["server"], "words": Words(**given["server"]["words"])})
    share = [Planned(**row) for row in given["plan"]]
    async with Local(server, share, given["concurrency"]) as driver:
        try:
            await driver.ready()
        except Refused as refusal:
            _say({"refusal": str(refusal)})
            return
        _say({"refusal": ""})
        start = json.loads(await asyncio.to_thread(sys.stdin.readline))["start"]
        async with _in_background(_say_tally(driver)):
            records = await driver.run(start)
        for record in records:
            _say({"record": asdict(record)})


async def _say_tally(driver: Driver) -> None:
    while True:
        _say({"tally": asdict(driver.tally)})
        await asyncio.sleep(TALLY_EVERY_S)


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    asyncio.run(_as_process())
