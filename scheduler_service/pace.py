"""How long work holds the event loop. In one of its turns reports, commands and submissions get so many units of work.
Questions are answered one at a time, and all of them together take a fifth of its time at most."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from protos.errors import QueueFull

PAUSE = 4.0  # times what the last answer took
MAX_PAUSE_S = 1.0
MAX_WAITING = 64
# Of work in a turn: a unit is what a row of a report costs, some 50 microseconds.
UNITS = 48
SUBMISSION = 4
CANCEL = FOLLOW = 1
REPEATED = 3  # some thirty rounds that a gateway asks for
MESSAGES = 4  # to gateways, in a turn


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
    """Lets so many units of work be done in one turn of the event loop, after which the loop looks at its sockets. Work
    for which there is no room waits for a later turn; first come, first served."""

    def __init__(self, units: int) -> None:
        self._units = units
        self._left = units  # in this turn
        self._granted = 0  # in the next turn, to work that has waited
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._called = False  # `_begin` will be, in the next turn

    async def room(self, units: int = 1) -> None:
        """Returns when so much work may be done, which has to follow at once. More than a turn has gets one alone."""
        units = min(units, self._units)
        loop = asyncio.get_running_loop()
        if not self._called:
            self._called = True
            loop.call_soon(self._begin)
        if not self._waiting and units <= self._left:
            self._left -= units
        else:
            self._waiting.append((units, turn := loop.create_future()))
            await turn

    def _begin(self) -> None:
        """A turn has begun, in which the work goes on that the last call has let in."""
        self._left, self._granted = self._units - self._granted, 0
        self._called = bool(self._waiting) or self._left < self._units
        if self._called:  # first: what is let in now may ask for more as soon as it goes on, and is counted by then
            asyncio.get_running_loop().call_soon(self._begin)
        while self._waiting and self._granted + self._waiting[0][0] <= self._units:
            units, turn = self._waiting.popleft()
            if not turn.done():  # else its task was cancelled
                turn.set_result(None)
                self._granted += units


def of_command(listed: int) -> int:
    """The units that a plan and its command cost. `listed`: requests of the command before it."""
    return 4 + listed // 3
