"""How long work holds the event loop. In one of its turns all work gets so many units: what peers ask for waits until
there is room; what cannot wait, such as a commit under way, leaves that much less to the others. Questions are answered
one at a time, and after each there is a pause, four times as long as its answer took, but a second at most."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import IntEnum

from protos.errors import QueueFull

PAUSE = 4.0  # times what the last answer took
MAX_PAUSE_S = 1.0
MAX_WAITING = 64
# Of work in a turn: a unit is what a row of a report costs, some 50 microseconds.
UNITS = 48
SUBMISSION = 8
CANCEL = FOLLOW = 1
REPEATED = 3  # some thirty rounds that a gateway asks for
DURABLE = 24  # some hundred writes that became durable, and are told
LOOKED_UP = 16  # a part of an answer to a question
MESSAGE = 2  # to a gateway
MESSAGES = 4  # to gateways, in a turn


class Lane(IntEnum):
    """Kinds of work that share the turns of the loop. Of two that have had as much the first goes first: a report is
    answered before another one is read."""

    COMMANDS = 0
    REPORTS = 1
    GATEWAYS = 2  # what they ask for
    DEADLINES = 3  # requests whose time is up


class Questions:
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
    for which there is no room waits for a later turn.

    Where several lanes wait each gets as many units as the others, by start-time fair queueing (Goyal, Vin, Cheng
    1996); within a lane it is first come, first served. In one line for all, sixty workers would leave a gateway, whose
    requests come in one stream, one of them for sixty reports.
    """

    def __init__(self, units: int) -> None:
        self._units = units
        self._left = units  # in this turn
        self._granted = 0  # in the next turn, to work that has waited
        self._taken = 0  # in this turn, by work that does not wait
        self._waiting = {lane: deque[tuple[int, asyncio.Future[None]]]() for lane in Lane}  # its units, and its turn
        self._virtual = 0  # time, in units: when the last work that was let in has begun
        self._begins = dict.fromkeys(Lane, 0)  # by virtual time: the next work of each
        self._called = False  # `_begin` will be, in the next turn

    async def room(self, units: int = 1, lane: Lane = Lane.GATEWAYS) -> None:
        """Returns when so much work may be done, which has to follow at once. More than a turn has gets one alone."""
        if not self._waiting[lane]:
            self._begins[lane] = max(self._virtual, self._begins[lane])
        self._call()
        if not any(self._waiting.values()) and min(units, self._units) <= self._left:
            self._left -= self._let_in(units, lane)
        else:
            turn = asyncio.get_running_loop().create_future()
            self._waiting[lane].append((units, turn))
            await turn

    def take(self, units: int) -> None:
        """So much work is done now, whether there is room or not. What goes on for several turns is taken to need as
        much in the next one, so others wait for less."""
        self._taken += units
        self._left -= units
        self._call()

    async def pause(self, units: int) -> None:
        """As `take`, and then others run."""
        self.take(units)
        await asyncio.sleep(0)

    def _call(self) -> None:
        if not self._called:
            self._called = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """A turn has begun, in which the work goes on that the last call has let in."""
        room = self._units - self._taken
        self._left, self._granted, self._called = room - self._granted, 0, False
        if any(self._waiting.values()) or self._taken or self._left < self._units:
            self._call()  # first: what is let in now may ask for more as soon as it goes on, and is counted by then
        self._taken = 0
        while (lane := self._first()) is not None:
            units, turn = self._waiting[lane][0]
            if self._granted and self._granted + min(units, self._units) > room:
                break
            self._waiting[lane].popleft()
            turn.set_result(None)
            self._granted += self._let_in(units, lane)

    def _first(self) -> Lane | None:
        """Whose work begins next. What was cancelled while it waited is dropped, and its lane gets no less for it."""
        for waiting in self._waiting.values():
            while waiting and waiting[0][1].done():
                waiting.popleft()
        return min((lane for lane in Lane if self._waiting[lane]), key=self._begins.__getitem__, default=None)

    def _let_in(self, units: int, lane: Lane) -> int:
        """Returns how much of a turn it takes."""
        self._virtual = self._begins[lane]
        self._begins[lane] += units
        return min(units, self._units)


def of_command(listed: int) -> int:
    """The units that a plan and its command cost. `listed`: requests of the command before it."""
    return 4 + listed // 3
