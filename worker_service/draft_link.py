"""The process that speaks with a drafter for a worker: `python -m worker_service.draft_link FD SETTINGS`. It passes
messages on, keeps a connection, and decides nothing. It ends with its worker, whose socket it has. No torch."""

import asyncio
import json
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

import grpc
import structlog

from protos.channels import options
from protos.link.v1 import draft_link_pb2 as pb
from protos.logs import configure_logs
from protos.outage import Outage
from protos.serving import BEAT_S, dialled, first_of
from protos.silence import Silence
from protos.tls import Tls

# Up: the session, then a ToDrafter. Down: the session, when it arrived, then a FromDrafter; none: the session is over.
UP, DOWN = struct.Struct("=Q"), struct.Struct("=Qd")
MESSAGE_BYTES = 64 << 10  # of a drafter at most; more ends the session
UP_BYTES, DOWN_BYTES = 128 << 10, DOWN.size + MESSAGE_BYTES  # of a packet
PROTOCOL = 1
_ATTACH = f"/{pb.DESCRIPTOR.services_by_name['DraftLink'].full_name}/Attach"
_WAITING = 4  # messages on their way to the drafter; further ones wait in the worker
_WELCOME_S = 5.0
_WRITE_S = 5.0  # a stream that takes nothing for so long is broken
_FAR_BEHIND_S = 0.01
RECONNECT_S = 0.1  # the first wait; it doubles up to the next
MAX_RECONNECT_S = 2.0
_LONG_S = 10.0  # after a session of such length the first wait is short again

_Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.ToDrafter, pb.FromDrafter]"


class SessionError(Exception):
    """This connection is over; another one may work."""


_CONNECTION_ERRORS = (grpc.aio.AioRpcError, SessionError, TimeoutError, asyncio.InvalidStateError)


@dataclass(frozen=True, slots=True)
class Settings:
    """`drafters`: HOST:PORT of each; the first that answers serves. `names`: what a drafter's certificate may be for;
    none: the host. `tls`: the paths of the three files. `vocabulary`: as in DraftHello."""

    drafters: Sequence[str]
    names: Sequence[str]
    tls: Mapping[str, str | None]
    worker_id: str
    vocabulary: str


class DraftLink:
    def __init__(self, worker: socket.socket, settings: Settings) -> None:
        """`worker`: of packets, to the worker's LinkPost."""
        worker.setblocking(False)
        self._worker, self._settings = worker, settings
        self._tls = Tls.model_validate(settings.tls)
        self._session = 0  # the number of the newest one
        self._to_drafter: asyncio.Queue[bytes] | None = None  # while a session is open
        self._outages = {drafter: Outage() for drafter in settings.drafters}
        self._log = structlog.get_logger().bind(service="worker", worker=settings.worker_id)

    async def run(self) -> None:
        """Until the worker has gone."""
        await first_of(self._from_worker, self._keep_session)

    async def _from_worker(self) -> None:
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while packet := await loop.sock_recv(self._worker, UP_BYTES):
                (session,) = UP.unpack_from(packet)
                if (queue := self._to_drafter) is not None and session == self._session:
                    await queue.put(packet[UP.size :])  # if it waits, so does the worker's text, in the worker

    async def _keep_session(self) -> None:
        names = self._settings.names if self._tls else ()
        wait_s = 0.0
        while True:
            begun = time.monotonic()
            for drafter, name in product(self._settings.drafters, names or [""]):
                try:
                    await self._converse(drafter, name)
                except _CONNECTION_ERRORS as error:
                    log = self._log.warning if self._outages[drafter].is_new(_brief(error)) else self._log.debug
                    log("no_drafter", drafter=drafter, error=_brief(error))
            lasted_s = time.monotonic() - begun
            wait_s = RECONNECT_S if lasted_s > _LONG_S else min(2 * wait_s or RECONNECT_S, MAX_RECONNECT_S)
            await asyncio.sleep(wait_s)

    async def _converse(self, drafter: str, name: str) -> None:
        """One session. Raises one of _CONNECTION_ERRORS, at its end at the latest."""
        chosen: dict[str, int | str] = {**dict(options(UP_BYTES)), "grpc.max_receive_message_length": MESSAGE_BYTES}
        if name:
            chosen["grpc.ssl_target_name_override"] = name
        credentials, pairs = self._tls.channel_credentials(), list(chosen.items())
        link = (
            grpc.aio.secure_channel(drafter, credentials, options=pairs)
            if credentials
            else grpc.aio.insecure_channel(drafter, options=pairs)
        )
        async with link:
            await dialled(link)
            call: _Call = link.stream_stream(_ATTACH, response_deserializer=pb.FromDrafter.FromString)()
            try:
                async with asyncio.timeout(_WELCOME_S):
                    welcome = await self._greet(call)
                await self._serve(call, welcome, drafter)
            finally:
                call.cancel()

    async def _greet(self, call: _Call) -> pb.FromDrafter:
        own = self._settings
        hello = pb.DraftHello(protocol=PROTOCOL, worker_id=own.worker_id, vocabulary=own.vocabulary)
        await call.write(pb.ToDrafter(hello=hello).SerializeToString())
        answer = await call.read()
        if not isinstance(answer, pb.FromDrafter):
            raise SessionError(f"refused: {await call.code()} {await call.details()}")
        if not answer.HasField("welcome") or answer.welcome.protocol != PROTOCOL:
            raise SessionError("its first message is no welcome of this version")
        return answer

    async def _serve(self, call: _Call, welcome: pb.FromDrafter, drafter: str) -> None:
        self._session += 1
        queue = self._to_drafter = asyncio.Queue[bytes](_WAITING)
        self._outages[drafter].over()
        self._log.info("drafter_attached", drafter=drafter, drafts_with=welcome.welcome.model)
        try:
            await self._tell_worker(welcome.SerializeToString())
            silence = Silence()
            await first_of(lambda: self._read(call, silence), lambda: self._write(call, queue), silence.lasts)
        finally:
            self._to_drafter = None
            while not queue.empty():  # who waits to put something there goes on
                queue.get_nowait()
            await self._tell_worker(b"")

    async def _tell_worker(self, message: bytes) -> None:
        """Raises OSError if the worker has gone."""
        packet = DOWN.pack(self._session, time.monotonic()) + message
        await asyncio.get_running_loop().sock_sendall(self._worker, packet)

    async def _read(self, call: _Call, silence: Silence) -> None:
        while True:
            message = await silence.read(call)
            if not isinstance(message, pb.FromDrafter):
                raise SessionError("it hung up, or its message was none")
            if message.HasField("drafts"):
                packet = DOWN.pack(self._session, time.monotonic()) + message.SerializeToString()
                try:
                    self._worker.send(packet)
                except BlockingIOError:  # the worker is far behind: by then they are late
                    await asyncio.sleep(_FAR_BEHIND_S)  # or it says far too much: it is not to keep a core busy

    async def _write(self, call: _Call, queue: asyncio.Queue[bytes]) -> None:
        while True:
            try:
                async with asyncio.timeout(BEAT_S):
                    message = await queue.get()
            except TimeoutError:
                message = b""  # a heartbeat
            async with asyncio.timeout(_WRITE_S):
                await call.write(message)


def _brief(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name} {error.details()}"
    return f"{type(error).__name__}: {error}"


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the worker decides when to end, and its last steps may want drafts
    worker, settings = socket.socket(fileno=int(sys.argv[1])), Settings(**json.loads(sys.argv[2]))
    configure_logs("worker", worker=settings.worker_id)
    with suppress(OSError):
        asyncio.run(DraftLink(worker, settings).run())


if __name__ == "__main__":
    main()
