"""A network that a test disturbs while it runs without an event loop: tests/chaos/proxy.py on a loop of its own."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.chaos.proxy import Proxy, Trouble
from tests.waiting import WAIT_S


class Network:
    """The way to `target`, a HOST:PORT. `address` leads there through the proxy."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="network")
        self._thread.start()
        self._proxy = Proxy(lambda: asyncio.open_connection(host, int(port)))
        asyncio.run_coroutine_threadsafe(self._proxy.start(), self._loop).result(WAIT_S)
        self.address = self._proxy.address

    @contextmanager
    def troubled(self, trouble: Trouble) -> Iterator[None]:
        lasting = self._proxy.troubled(trouble)
        self._do(lasting.__enter__)
        try:
            yield
        finally:
            self._do(lambda: lasting.__exit__(None, None, None))

    def cut(self) -> None:
        self._do(self._proxy.cut)

    def close(self) -> None:
        self._do(self._proxy.stop)
        asyncio.run_coroutine_threadsafe(_over(), self._loop).result(WAIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Callable[[], Any]) -> None:
        async def there() -> None:
            work()

        asyncio.run_coroutine_threadsafe(there(), self._loop).result(WAIT_S)


async def _over() -> None:
    """Whatever still runs on this loop ends."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
