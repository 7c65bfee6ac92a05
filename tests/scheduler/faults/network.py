"""gRPC in memory, between processes of one virtual loop: calls that take time, are held up, and break. As on a real
transport each direction of a call keeps its order; what is late, doubled or out of order comes by another call.

What is not modelled: retries inside gRPC, and windows in bytes.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc

from tests.scheduler.faults.loop import Process, VirtualLoop

KEEPALIVE_S = 30.0  # after so long an end whose peer is gone without a word notices it
WINDOW = 64  # messages of one direction on their way or unread; then the writer waits
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
Status = tuple[grpc.StatusCode, str, tuple[Any, ...]]


class Network:
    """Who listens where, and how each pair of processes is connected."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, failed: Callable[[str], None]) -> None:
        """`failed` is told of what a handler raised beside what gRPC provides for."""
        self.loop, self.rng, self.failed = loop, rng, failed
        self.listeners: dict[str, Any] = {}  # a SimServer by address
        self.calls: dict[Call, None] = {}
        self.slow: dict[frozenset[str], float] = {}  # seconds more, between two processes
        self.held: dict[frozenset[str], float] = {}  # until when nothing gets through

    def latency_s(self, pair: frozenset[str]) -> float:
        return self.rng.uniform(0.0001, 0.002) + self.slow.get(pair, 0.0) * self.rng.random()

    def arrival(self, pair: frozenset[str]) -> float:
        """When what is sent now arrives."""
        return max(self.loop.now, self.held.get(pair, 0.0)) + self.latency_s(pair)

    def ended(self, process: Process, *, silently: bool) -> None:
        """Its peers hear of it at once, if its machine still runs; else their keepalive tells them."""
        for address in [address for address, server in self.listeners.items() if server.process is process]:
            del self.listeners[address]
        for call in [call for call in self.calls if process in call.ends]:
            call.broken(0.0 if silently else 1.0, lost=silently)

    def cut(self, pair: frozenset[str], noticed: float, lost: bool) -> None:
        """Every call between the two. `noticed`: the share of the ends that hear of it."""
        for call in [call for call in self.calls if call.pair == pair]:
            call.broken(noticed, lost=lost)


class Inbox:
    """One direction of a call, as its reader has it. The last item, a status or EOF, stays."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._items: deque[Any] = deque()
        self.end: Any = None
        self.unread = 0  # on their way, or here
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    def put(self, item: bytes) -> None:
        if self.end is None:
            self._items.append(item)
            _wake(self._reader)

    def close(self, end: Any) -> None:
        if self.end is None:
            self.end = end
            _wake(self._reader)
            _wake(self._writer)

    async def get(self) -> Any:
        while not self._items and self.end is None:
            self._reader = self._loop.create_future()
            await self._reader
        if not self._items:
            return self.end
        self.unread -= 1
        _wake(self._writer)
        return self._items.popleft()

    async def room(self) -> None:
        while self.unread >= WINDOW and self.end is None:
            self._writer = self._loop.create_future()
            await self._writer


def _wake(future: "asyncio.Future[None] | None") -> None:
    if future is not None and not future.done():
        future.set_result(None)


class Call:
    """One RPC: what both ends share. The client's and the server's view are below."""

    def __init__(self, network: Network, client: Process, address: str, method: str) -> None:
        self.network, self.loop, self.client, self.method = network, network.loop, client, method
        self.server: Process | None = None
        self.down, self.up = Inbox(self.loop), Inbox(self.loop)  # to the client; to the server
        self.metadata: asyncio.Future[tuple[Any, ...]] = self.loop.create_future()
        self.task: asyncio.Task[None] | None = None  # of the handler
        self._sent = {id(self.down): 0.0, id(self.up): 0.0}  # when the last thing sent there arrives
        self.deadline: float | None = None
        self.invocation_metadata: object = ()
        self.alive = True  # what is sent arrives
        self.lost = False  # and so does what was sent before
        listener = network.listeners.get(address)
        name = listener.process.name if listener else address
        self.pair = frozenset((client.name, name))
        network.calls[self] = None
        self._at(self._arrival(self.up), self._dialled, address)

    @property
    def ends(self) -> tuple[Process | None, ...]:
        return self.client, self.server

    def _at(self, when: float, callback: Callable[..., object], *args: Any) -> None:
        self.loop.at(when, callback, *args)

    def _arrival(self, inbox: Inbox) -> float:
        when = max(self.network.arrival(self.pair), self._sent[id(inbox)] + 1e-6)  # timers of one time have no order
        self._sent[id(inbox)] = when
        return when

    def _dialled(self, address: str) -> None:
        listener = self.network.listeners.get(address)
        handler = listener and listener.handlers.get(self.method)
        if listener is None or handler is None or not listener.open:
            self.hang_up((UNAVAILABLE, "connection refused", ()))
            return
        self.server = listener.process
        self.pair = frozenset((self.client.name, self.server.name))
        serving = listener.serve(self, handler)
        self.task = self.loop.create_task(serving, context=self.server.context.copy())

    def send(self, inbox: Inbox, message: bytes) -> None:
        if self.alive:
            inbox.unread += 1
            self._at(self._arrival(inbox), self._arrive, inbox, message)

    def _arrive(self, inbox: Inbox, message: bytes) -> None:
        if not self.lost:
            inbox.put(message)

    def finish(self, status: Status) -> None:
        """The server's last word."""
        if self.alive:
            self._at(self._arrival(self.down), self._finished, status)
            self.up.close(grpc.aio.EOF)

    def _finished(self, status: Status) -> None:
        if not self.lost:
            self.hang_up(status)

    def hang_up(self, status: Status) -> None:
        """The client hears of the end."""
        self.network.calls.pop(self, None)
        self.down.close(status)
        if not self.metadata.done():
            self.metadata.set_result(())

    def cancel(self) -> None:
        """By the client: the server's handler is cancelled once it hears of that."""
        if self.down.end is None:
            self.down.close((grpc.StatusCode.CANCELLED, "cancelled", ()))
            if self.alive:
                self._at(self._arrival(self.up), self.dropped)
            self.network.calls.pop(self, None)

    def expire(self) -> None:
        if self.down.end is None:
            self.cancel()
            self.down.end = (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", ())

    def dropped(self) -> None:
        """The server hears of the end."""
        self.up.close(grpc.aio.EOF)
        if self.task is not None:
            self.task.cancel()

    def broken(self, noticed: float, *, lost: bool) -> None:
        """Nothing that is sent from now on arrives; `lost`: nor what is on its way. Each end hears of it after what
        arrives, or by its keepalive."""
        self.network.calls.pop(self, None)
        rng, now = self.network.rng, self.loop.now
        self.alive, self.lost = False, lost
        reset = UNAVAILABLE, "connection reset", ()
        for inbox, tell in ((self.down, lambda: self.hang_up(reset)), (self.up, self.dropped)):
            heard = rng.random() < noticed
            when = self._arrival(inbox) if heard else now + KEEPALIVE_S * rng.uniform(0.7, 1)
            self._at(when, tell)
