"""Questions that cost the event loop time, one at a time: all of them together take a fifth of it at most."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from protos.errors import QueueFull

PAUSE = 4.0  # times what the last answer took
MAX_PAUSE_S = 1.0
MAX_WAITING = 64


class Pace:
    def __init__(self) -> None:
        self._one = asyncio.Lock()
        self._waiting = 0
        self._free_at = 0.0

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Answer one question in here. Raises QueueFull if too many wait."""
        if self._waiting >= MAX_WAITING:
            raise QueueFull("too many ask for statistics", retry_after_ms=1000)
        now = asyncio.get_running_loop().time
        self._waiting += 1
        try:
            async with self._one:
                if (pause_s := self._free_at - now()) > 0:
                    await asyncio.sleep(pause_s)
                began = now()
                yield
                self._free_at = now() + min(PAUSE * (now() - began), MAX_PAUSE_S)
        finally:
            self._waiting -= 1
