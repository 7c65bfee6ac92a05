"""Four cells of real schedulers, each with its Redis, behind two gateways under load. One cell is killed and comes
back: every stream is whole, and each of its tokens is the one that it has to be. Prints its figures."""

import asyncio
import hashlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from laps_sd.client import AsyncClient, Collector
from laps_sd.options import Options
from laps_sd.ports import HOST, claim_ports
from laps_sd.redis_server import own_redis
from laps_sd.schedbench import workers as peers
from laps_sd.stack import gateway_command, scheduler_command
from laps_sd.supervise import Child
from tests.gateway.harness import model_info
from tests.waiting import until

pytestmark = pytest.mark.timeout(900)

NAMES = ("a", "b", "c", "d")
KILLED = "b"
WORKERS, SLOTS, ROUND_S = 2, 4, 0.05
TOKENS = 120
REQUESTS, RATE = 150, 5.0
KILLED_AFTER, DOWN_S = 50, 4.0


def token(id: str, position: int) -> int:
    """The one that must stand there."""
    return 2 + hashlib.blake2b(f"{id} {position}".encode(), digest_size=4).digest()[0]


class Worker(peers.Worker):
    """Its tokens follow from the request's id. It comes back whenever its scheduler does."""

    def __init__(self, target: str, number: int) -> None:
        super().__init__(target, number, SLOTS, model_info(context_tokens=1024))
        self.round_s = ROUND_S
        self.go.set()

    async def serve(self) -> None:
        for session in range(1_000_000):
            self._requests.clear()
            self._hello.session = f"session-{session}"
            with suppress(Exception):
                await self.run()
            await asyncio.sleep(0.1)

    def _row(self, report: Any, run: Any, request: Any) -> None:
        super()._row(report, run, request)
        row = report.rows[-1]
        row.tokens[:] = [token(row.request_id, row.start + at) for at in range(len(row.tokens))]


@dataclass
class Cells:
    """`processes`: scheduler and Redis of each cell."""

    processes: dict[str, list[Child]] = field(default_factory=dict)
    gateways: list[str] = field(default_factory=list)

    async def keep_down(self, name: str, seconds: float) -> None:
        """kill -9 of all of the cell, as often as it comes back."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            for child in self.processes[name]:
                if child.pid is not None:
                    with suppress(ProcessLookupError):
                        os.kill(child.pid, signal.SIGKILL)
            await asyncio.sleep(0.02)


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Cells]:
    cells, file, options = Cells(), folder / "cells.toml", Options(log_level="warning", grpc_port=0)
    ports = claim_ports(*[0] * (len(NAMES) + 4))
    text = "version = 1\n"
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        children, serving = [], []
        for name, port in zip(NAMES, ports, strict=False):
            data = stack.enter_context(tempfile.TemporaryDirectory())
            url, redis = stack.enter_context(own_redis(options, Path(data)))
            commands = [*redis, scheduler_command(options, port, url)]
            cells.processes[name] = [Child(command, sys.stderr.buffer.write) for command in commands]
            children += cells.processes[name]
            text += f'[[cell]]\nname = "{name}"\nschedulers = "{HOST}:{port}"\n'
            serving += [tasks.create_task(Worker(f"{HOST}:{port}", number).serve()) for number in range(WORKERS)]
        file.write_text(text)
        for grpc, http in (ports[4:6], ports[6:8]):
            command = gateway_command(options, grpc, http, "")
            words = list(command.arguments)
            words[words.index("--scheduler") : words.index("--scheduler") + 2] = ["--cells", str(file)]
            children.append(Child(type(command)("gateway", words), sys.stderr.buffer.write))
            cells.gateways.append(f"{HOST}:{grpc}")
        for child in children:
            tasks.create_task(child.keep_running())
        try:
            yield cells
        finally:
            for task in serving:
                task.cancel()
            for child in reversed(children):
                await child.stop()


async def test_a_cell_is_killed_and_comes_back_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laps_sd.supervise.MAX_EARLY_DEATHS", 10_000)  # it is killed more often than that
    monkeypatch.setattr("laps_sd.supervise.MAX_BACKOFF_S", 0.2)
    async with running(tmp_path) as cells, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient(at)) for at in cells.gateways]
        for client in clients:

            async def complete(client: AsyncClient = client) -> bool:
                with suppress(Exception):
                    return len((await client.stats()).workers) == WORKERS * len(NAMES)
                return False

            await until(complete, 120)
        down: list[tuple[float, float]] = []

        async def kill() -> None:
            began = time.monotonic()
            await cells.keep_down(KILLED, DOWN_S)
            down.append((began, time.monotonic()))

        asks, killing = [], None
        for number in range(REQUESTS):
            if number == KILLED_AFTER:
                killing = asyncio.create_task(kill())
            asks.append(asyncio.create_task(ask(clients, number)))
            await asyncio.sleep(1 / RATE)
        assert killing is not None
        await killing
        answers = await asyncio.gather(*asks)
        ((began, ended),) = down
        drawn = [one for one in answers if one.drawn]
        new = [one for one in drawn if began + 1 < one.sent < ended]
        assert not any(one.id.startswith(f"{KILLED}-") for one in new)
        places = [one.id.partition("-")[0] for one in drawn]
        spread = {name: places.count(name) for name in NAMES}
        waited = max(one.took for one in answers if one.sent < began)
        away = [one for one in drawn if one.id.startswith(f"{KILLED}-") and one.sent < began]
        moved = [sum(one.left > 0 for one in some) for some in (answers, away)]
        print(  # noqa: T201
            f"\n{len(answers)} streams over two gateways, all whole and every token right; cell {KILLED} down for "
            f"{DOWN_S:g} s: {len(new)} came then and ran elsewhere, at most {max(one.took for one in new):.1f} s; "
            f"what it had took up to {waited:.1f} s; {moved[0]} went on at the other gateway, {moved[1]} of it; "
            f"drawn ids by cell: {spread}"
        )


class Answer(NamedTuple):
    """Of a request. `took`: until it was whole. `left`: when its client left the first gateway; 0: it did not."""

    id: str
    sent: float
    took: float
    drawn: bool
    left: float


async def ask(clients: list[AsyncClient], number: int) -> Answer:
    """Every third chooses its id; half of all are read to a third, then at the other gateway, also while their cell is
    down."""
    client, other, sent = clients[number % 2], clients[1 - number % 2], time.monotonic()
    params: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True}
    chosen, moves = number % 3 == 0, number % 4 < 2
    if chosen:
        params |= {"request_id": f"order-{number}", "on_disconnect": "detach"}
    collector = Collector()
    stream = client.generate("the quick", **params)
    async for chunk in stream:
        collector.add(chunk)
        if moves and len(collector.token_ids) > TOKENS // 3:
            break
    left = time.monotonic() if moves else 0.0
    if chosen:
        await stream.aclose()  # it runs on
    id = collector.request_id
    if moves:
        async for chunk in other.resume(id, len(collector.token_ids)):
            collector.add(chunk)
    await stream.aclose()
    assert collector.token_ids == [token(id, position) for position in range(TOKENS)]
    return Answer(id, sent, time.monotonic() - sent, not chosen, left)
