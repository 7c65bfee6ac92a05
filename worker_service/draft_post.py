"""The worker's end of the link to a drafter elsewhere: a socket to a process that speaks with the drafter. All of it
runs in the model's thread, without a thread or an event loop of its own, for those would hold up the model."""

import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from protos.link.v1 import draft_link_pb2 as pb
from worker_service.draft_link import DOWN, DOWN_BYTES, UP, UP_BYTES
from worker_service.engine.drafting.remote import Chain
from worker_service.engine.drafting.remote_drafter import Drafts, Gone, News, Refused, Truth, Welcome

# Read at a time, for that is time of the model: a drafter that says more than an honest one ever would loses it.
_PACKETS, _CHAINS = 32, 1024
_PER_ROW = 128  # chains that may come for each row that was told; an honest drafter has fewer
RESTART_S = 5.0  # between two starts of the process
END_S = 5.0  # that the process may take to end
_MOST_S = 3600.0
FLOODED_S = 60.0  # without one, after a drafter that said far more than it was asked


class LinkPost:
    """See `Post`. The process is started with the first message, and again when it has ended."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """`settings`: of `draft_link.Settings`."""
        self._settings = json.dumps(settings)
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._session = 0  # 0: none
        self._start_s = 0.0  # not before
        self._due = 0  # chains that may still come

    def now(self) -> float:
        return time.monotonic()  # of the machine: the process stamps arrivals with it

    def send(self, rows: Sequence[Truth]) -> bool:
        truths = pb.Truths(rows=[pb.Truth(**row._asdict()) for row in rows])
        packet = UP.pack(self._session) + pb.ToDrafter(truths=truths).SerializeToString()
        if self._socket is None or len(packet) > UP_BYTES:
            return False
        try:
            sent = self._socket.send(packet) == len(packet)
        except OSError:  # it is full, or the process has gone, which `receive` notices
            return False
        self._due = min(self._due + _PER_ROW * len(rows), _CHAINS * _PACKETS)
        return sent

    def receive(self, wait_s: float) -> Sequence[News]:
        if self._socket is None and not self._start():
            return []
        news = list(self._packets())
        if not news and wait_s > 0 and self._socket is not None:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            poll.poll(1e3 * wait_s)
            news = list(self._packets())
        return news

    def close(self) -> None:
        """The process ends, since nobody is at the other end of its socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _start(self) -> bool:
        if self.now() < self._start_s:
            return False
        self._start_s = self.now() + RESTART_S
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:  # no descriptors left: later, perhaps
            return False
        ours.setblocking(False)
        command = [sys.executable, "-m", "worker_service.draft_link", str(theirs.fileno()), self._settings]
        with theirs:
            try:
                self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            except OSError:  # no memory, no room for a process: later, perhaps
                ours.close()
                return False
        self._socket, self._session = ours, 0
        return True

    def _packets(self) -> Iterator[News]:
        room = _CHAINS
        for _ in range(_PACKETS):
            if room <= 0:
                return
            try:
                packet = self._socket.recv(DOWN_BYTES) if self._socket is not None else b""
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:  # the process has ended
                self._ended()
                yield Gone()
                return
            session, arrived_s = DOWN.unpack_from(packet)
            for news in self._opened(session, arrived_s, packet[DOWN.size :]):
                chains = len(news.chains) + len(news.refused) if isinstance(news, Drafts) else 0
                room, self._due = room - chains, self._due - chains
                if self._due < 0:
                    self._ended()
                    self._start_s = self.now() + FLOODED_S
                    yield Gone()
                    return
                yield news

    def _ended(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.poll()
        self._socket, self._session = None, 0

    def _opened(self, session: int, arrived_s: float, message: bytes) -> Iterator[News]:
        if not message:
            self._session = 0
            yield Gone()
            return
        answer = pb.FromDrafter.FromString(message)
        if answer.HasField("welcome"):
            self._session, welcome, self._due = session, answer.welcome, _CHAINS
            bounds = welcome.handles, welcome.longest_chain, welcome.context_tokens, welcome.vocab_size
            yield Welcome(*bounds, _seconds(welcome.step_s), _seconds(welcome.chain_s), welcome.widest_fan)
        elif answer.HasField("drafts"):
            chains = answer.drafts.chains[:_CHAINS]
            yield Drafts(
                arrived_s,
                [(c.handle, Chain(c.at, c.prefix, c.tokens)) for c in chains if c.tokens and not c.standing],
                [_refused(c) for c in chains if c.standing],
            )


def _seconds(said: float) -> float:
    """0 of what is none, or beyond all reason: a drafter may lie, and sums of these go to the scheduler."""
    return said if 0 <= said < _MOST_S else 0.0


def _refused(chain: pb.Chain) -> Refused:
    return Refused(chain.handle, chain.at if chain.standing == pb.STANDING_SEND else None)
