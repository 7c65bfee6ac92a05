"""How long work holds the event loop. Of reports, commands and submissions a few are handled in one of its turns: fewer
where each takes long.
Questions are answered one at a time, and all of them together take a fifth of its time at most."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from protos.errors import QueueFull

PAUSE = 4.0  # times what the last answer took
MAX_PAUSE_S = 1.0
MAX_WAITING = 64
IN_A_TURN = 4  # reports, commands and submissions, at most
LONG_S = 0.003  # in a turn that has taken so long none is begun any more


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


class Turns:
    """Lets IN_A_TURN pieces of work be done in one turn of the event loop, or fewer if they take long, after which the
    loop looks at its sockets. Others wait for a later turn, in their order."""

    def __init__(self) -> None:
        self._left = IN_A_TURN
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._late: list[asyncio.Future[None]] = []  # their turn had taken long before they came
        self._ends_at: float | None = None  # of this turn, by the loop's clock; None: no piece has begun

    async def room(self) -> None:
        """Returns when one piece of work may be done, which has to follow at once."""
        loop = asyncio.get_running_loop()
        if self._left == IN_A_TURN:
            loop.call_soon(self._begin)  # called in the next turn
        if self._left and self._is_early(loop.time()):
            self._left -= 1
            return
        self._waiting.append(turn := loop.create_future())
        await turn
        while not self._is_early(loop.time()):
            self._late.append(turn := loop.create_future())
            await turn

    def _is_early(self, now: float) -> bool:
        if self._ends_at is None:
            self._ends_at = now + LONG_S
            return True
        return now <= self._ends_at

    def _begin(self) -> None:
        """A turn has begun. Those that may go on now do so in the next one."""
        self._left, self._ends_at = IN_A_TURN, None
        self._waiting.extendleft(reversed(self._late))
        self._late.clear()
        while self._waiting and self._left:
            if not (turn := self._waiting.popleft()).done():  # else its task was cancelled
                turn.set_result(None)
                self._left -= 1
        if self._left < IN_A_TURN:
            asyncio.get_running_loop().call_soon(self._begin)
