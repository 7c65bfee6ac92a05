"""Workers and gateways of the bench, run together. Nothing is measured here."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

from laps_sd.schedbench.gateways import Gateway
from laps_sd.schedbench.workers import Worker

Start = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


@asynccontextmanager
async def running(workers: Sequence[Worker], gateways: Sequence[Gateway] = ()) -> AsyncIterator[Start]:
    """The workers and, once all of these are attached, the gateways. What it gives starts further work beside them;
    all of it is cancelled when the block ends. Raises a group with the ConnectionError of any of them."""
    begun = []
    async with asyncio.TaskGroup() as tasks:

        def begin(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            begun.append(task := tasks.create_task(work))
            return task

        for worker in workers:
            begin(worker.run())
        await asyncio.gather(*(worker.attached.wait() for worker in workers))
        for gateway in gateways:
            begin(gateway.run())
        yield begin
        for task in begun:
            task.cancel()


def start(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.go.set()


def stop(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.go.clear()
