"""The way between the stages of a model: connections in which each stage has a message from the one before it. How they
meet is in rendezvous.py, and what messages mean in engine/stages.py.

Plain TCP, so that a message costs its way and nothing else: gloo asks the receiver first, which is a round trip for
each. Nothing is encrypted, and nobody proves who he is: SECURITY.md says what follows.
"""

import asyncio
import json
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from worker_service.engine.parallel import ParallelError
from worker_service.engine.stages import Call, Stage, StagedTarget
from worker_service.model_files import ModelError

START_S = 1800.0  # between the first stage that has loaded its layers and the last
SEND_S = 60.0
ANSWER_S = 900.0  # of a pass; a worker's watchdog is stricter, as it knows what a pass takes

_PREFIX = struct.Struct("!4sII")  # magic, bytes of JSON, bytes of hidden states
_MAGIC = b"LSDs"
MOST_HELLO = 1 << 16  # bytes of what is said before a stage is known; no hidden states
_MOST_WORDS, _MOST_BODY = 16 << 20, 1 << 30
# A machine that is gone says no goodbye: it is given up after half a minute. The last one, in ms, is for what it has
# not acknowledged, since nothing probes meanwhile. It bounds probing, too: with more, idle links would be held longer.
_KEPT_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}


class StrangerError(ParallelError):
    """At the other end is no stage of ours."""


class StageLink:
    """One connection to another stage. Not thread-safe."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        """`name`: of the other stage, for people."""
        self.name, self._socket = name, connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEPT_ALIVE.items():
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, call: Call) -> None:
        """Raises ParallelError."""
        words = json.dumps((call.name, call.arguments), default=list).encode()
        try:
            self._socket.settimeout(SEND_S)
            self._socket.sendall(_PREFIX.pack(_MAGIC, len(words), len(call.body)) + words)
            self._socket.sendall(call.body)
        except OSError as error:
            raise ParallelError(f"{self.name} is gone: {error}") from error

    def receive(self, within_s: float | None = None, most_bytes: int = _MOST_WORDS) -> Call:
        """The next message. `within_s`: for all of it, however slowly it comes; None: whenever it comes. Raises
        ParallelError, and StrangerError where what comes is no message."""
        deadline = None if within_s is None else time.monotonic() + within_s
        try:
            magic, words, body = _PREFIX.unpack(self._read(_PREFIX.size, deadline))
            if magic != _MAGIC or words > most_bytes or body > _MOST_BODY or (body and most_bytes == MOST_HELLO):
                raise StrangerError(f"{self.name} says what is no message between stages")
            name, arguments = json.loads(self._read(words, deadline))
            return Call(name, arguments, self._read(body, deadline))
        except StrangerError:
            raise
        except OSError as error:
            raise ParallelError(f"{self.name} is gone: {error}") from error
        except (ValueError, TypeError, RecursionError) as error:
            raise StrangerError(f"{self.name} says what is no message between stages") from error

    def _read(self, size: int, deadline: float | None) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while len(view):
            if deadline is None:
                self._socket.settimeout(None)
            elif (left := deadline - time.monotonic()) > 0:
                self._socket.settimeout(left)
            else:
                raise TimeoutError("timed out")
            if not (n := self._socket.recv_into(view)):
                raise ConnectionResetError("the connection ended")
            view = view[n:]
        return data

    @property
    def ended(self) -> bool:
        """Whether the other end has closed the connection, though nothing was read from it."""
        try:
            self._socket.settimeout(0)
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def own_host(self) -> str:
        """By which address this process is reached here."""
        return str(self._socket.getsockname()[0])

    @property
    def other_host(self) -> str:
        return str(self._socket.getpeername()[0])

    def close(self) -> None:
        """Also wakes a thread that waits for a message."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


MakeLink = Callable[[socket.socket, str], StageLink]


class Leader:
    """All other stages, as the first one sees them: `links` in order."""

    def __init__(self, links: Sequence[StageLink]) -> None:
        self._links = links

    def target(self, model: Any) -> StagedTarget:
        """Of the first stage's layers, and all others."""
        return StagedTarget(model, self)

    def loaded(self) -> None:
        """Returns when all others have loaded their layers. Raises ParallelError, ModelError."""
        deadline = time.monotonic() + START_S
        for link in self._links:
            match link.receive(max(deadline - time.monotonic(), 0.1)):
                case "loaded", _, _:
                    pass
                case "failed", [problem], _:
                    raise ModelError(f"{link.name}: {problem}")
                case name, _, _:
                    raise StrangerError(f"{link.name} says {name!r} where it must have loaded its layers")

    def call(self, call: Call) -> None:
        self._links[0].send(call)

    def answer(self) -> Call:
        return self._links[-1].receive(ANSWER_S)

    def leave(self, problem: str | None = "") -> None:
        """The others end: in peace, because of a `problem` that starting again cannot mend, or (None) as lost stages,
        which are started again."""
        if problem is not None:
            with suppress(ParallelError):
                self.call(Call("leave", (problem,)))
        for link in self._links:
            link.close()

    async def lost(self) -> None:
        """Raises ParallelError when another stage is gone; until then it waits, also while nothing is computed."""
        if not hasattr(select, "epoll"):  # then it is noticed in the next pass
            await asyncio.Event().wait()
        loop = asyncio.get_running_loop()
        gone: asyncio.Future[None] = loop.create_future()
        with select.epoll() as watched:
            for link in self._links:
                watched.register(link.fileno(), select.EPOLLRDHUP)
            loop.add_reader(watched.fileno(), lambda: None if gone.done() else gone.set_result(None))
            try:
                await gone
            finally:
                loop.remove_reader(watched.fileno())
            found = [fd for fd, _ in watched.poll(0)]
        name = next((link.name for link in self._links if link.fileno() in found), "a stage")
        raise ParallelError(f"{name} is gone: the connection ended")


class Follower:
    """The way of a stage behind the first: calls come from the one before it, and go on to the one after it."""

    def __init__(self, leader: StageLink, before: StageLink, after: StageLink) -> None:
        """`after`: of the last stage the leader."""
        self._leader, self._before, self._after = leader, before, after

    @property
    def last(self) -> bool:
        return self._after is self._leader

    def loaded(self, problem: str = "") -> None:
        """Tell the leader that this stage's layers are loaded, or why not. Raises ParallelError."""
        self._leader.send(Call("failed", (problem,)) if problem else Call("loaded", ()))

    def follow(self, stage: Stage) -> None:
        """Do what the leader calls for until it leaves. Raises ParallelError when another stage is lost, ModelError
        when the model cannot be served."""
        while (call := self._before.receive()).name != "leave":
            if onward := stage.take(call):
                self._after.send(onward)
        if not self.last:
            self._after.send(call)
        if problem := stage.problem or call.arguments[0]:
            raise ModelError(problem)
