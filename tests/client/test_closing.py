"""A client that was closed says so: in a call that runs then, and in later ones."""

import asyncio
import threading

import pytest

from laps_sd import AsyncClient, Client
from laps_sd.client import NotServing, QueueFull
from tests.client.scripted import Gateway, chunk, serving
from tests.waiting import until

WAITS = [chunk(0, [1], "a"), None]
CLOSED = "this client was closed"


async def test_a_call_that_runs_when_its_client_is_closed_raises_a_request_error() -> None:
    """gRPC cancels it, and a task that seems cancelled would end a TaskGroup in silence."""
    with serving(Gateway(WAITS, WAITS)) as gateway:
        client, begun = AsyncClient(gateway.target), asyncio.Event()

        async def reads() -> None:
            async for _ in client.generate("x"):
                begun.set()

        tasks = [asyncio.create_task(reads()), asyncio.create_task(client.complete("x"))]
        await begun.wait()
        await client.close()
        for task in tasks:
            with pytest.raises(NotServing, match=CLOSED):
                await task


async def test_a_detached_stream_does_not_open_the_connections_again() -> None:
    full = QueueFull("full", retry_after_ms=2000)
    with serving(Gateway([full], [chunk(0, [1], "a"), None])) as gateway:
        client = AsyncClient(gateway.target)
        task = asyncio.create_task(client.complete("x", on_disconnect="detach"))

        async def asked() -> bool:
            return len(gateway.asked) == 1

        await until(asked)
        await client.close()
        with pytest.raises(NotServing, match=CLOSED):
            await task


async def test_a_task_that_is_cancelled_while_its_client_is_closed_stays_cancelled() -> None:
    with serving(Gateway(WAITS)) as gateway:
        client, begun = AsyncClient(gateway.target), asyncio.Event()

        async def reads() -> None:
            async for _ in client.generate("x"):
                begun.set()

        task = asyncio.create_task(reads())
        await begun.wait()
        task.cancel()
        await client.close()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("on_disconnect", ["cancel", "detach"])
def test_a_stream_of_a_client_that_is_closed_ends_with_a_request_error(on_disconnect: str) -> None:
    with serving(Gateway(WAITS)) as gateway:
        client = Client(gateway.target)
        stream = client.generate("x", on_disconnect=on_disconnect)  # type: ignore[arg-type]
        assert next(stream).text == "a"
        closing = threading.Thread(target=client.close)
        closing.start()
        with pytest.raises(NotServing, match=CLOSED):
            next(stream)
        closing.join()
        for call in (client.stats, lambda: client.complete("x"), client.ready):
            with pytest.raises(NotServing, match=CLOSED):
                call()
