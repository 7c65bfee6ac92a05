"""Serves an ASGI app in the running event loop, with uvicorn's HTTP/1.1: the port, TLS whose files are read again when
they change, and bounds on what a connection costs before any request. It knows no paths."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from types import SimpleNamespace
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from protos.serving import address

IDLE_S = 10.0  # a connection that sends no request for so long is closed
KEEP_ALIVE_S = 60  # the same between two requests
HEADER_BYTES = 64 << 10  # of one request, before its body
BACKLOG = 1024
MAX_CONNECTIONS = 8192
STALLED_S = 60.0
EARLY_BYTES = 4 << 10  # that a connection may send before the answer is whole, and still be seen to end
PIECE_BYTES = 64 << 10  # of a whole answer given to the transport at a time
BODY = "laps_sd.body"  # among a scope's extensions: its Body, unless the answer has none


class HttpServer:
    """One port. uvicorn's own Server handles signals and looks twice a second whether it is to end: neither is wanted
    here, so its protocol alone is used."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        tls_context: Callable[[], ssl.SSLContext] | None = None,
        unreadable: bytes = b'"this is no request of HTTP/1.1"',
        stalled_s: float = STALLED_S,
    ) -> None:
        """Port 0: any. `tls_context` gives the context for each handshake; None: plaintext. `unreadable`: JSON, the
        body of the 400 for bytes that are no request. `stalled_s`: a client that takes so many seconds for PIECE_BYTES
        of a whole answer, or of a stream's end, is cut off; before that streams see to it. Raises OSError if the port
        is taken."""
        self._socket = _bind(host.strip("[]"), port)
        self.port = int(self._socket.getsockname()[1])
        self._tls_context = tls_context
        self._unreadable, self._stalled_s = unreadable, stalled_s
        self._state = ServerState()
        self._config = uvicorn.Config(
            _with_body(app, stalled_s),
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            h11_max_incomplete_event_size=HEADER_BYTES,
        )
        self._config.load()
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # the app logs what goes wrong in it
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Returns once it accepts connections."""

        def protocol() -> asyncio.Protocol:
            return _Protocol(self._config, self._state, self._unreadable, self._stalled_s)

        context = self._tls_context and _renewed(self._tls_context)
        self._server = await asyncio.get_running_loop().create_server(
            protocol,
            sock=self._socket,
            backlog=BACKLOG,
            ssl=context,
            ssl_handshake_timeout=IDLE_S if context else None,
        )

    async def stop(self, grace_s: float) -> None:
        """Answers that are under way may end within `grace_s` seconds; then they are cancelled."""
        if self._server is None:
            self._socket.close()
            return
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if tasks := set(self._state.tasks):
            _, late = await asyncio.wait(tasks, timeout=grace_s)
            for task in late:
                task.cancel()
        for connection in list(self._state.connections):
            connection.transport.abort()


class Body:
    """The body of an answer without a length, once its head is out: written straight to the transport, in chunks (RFC
    9112, 7.1). The app's middleware and ASGI's messages cost more than that, and say nothing but at head and end."""

    def __init__(self, cycle: Any) -> None:
        """`cycle`: uvicorn's, of the request that is answered."""
        self._cycle, self._flow = cycle, cycle.flow
        self._chunked = cycle.scope["http_version"] >= "1.1"  # else the end of the connection ends it; as h11 has it

    @property
    def waits(self) -> bool:
        """Whether the client is behind with its reading: more is to wait."""
        return bool(self._flow.write_paused)

    def write(self, data: bytes) -> None:
        """`data` must not be empty. Where the client has gone nothing happens."""
        transport: asyncio.Transport = self._cycle.transport
        if not transport.is_closing():
            transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    @contextmanager
    def in_one_piece(self) -> Iterator[None]:
        """The pieces that the block sends by ASGI go out together when it ends: each write costs a system call, and
        wakes the client. The block must neither wait nor end the answer."""
        transport, pieces = self._cycle.transport, list[bytes]()
        self._cycle.transport = SimpleNamespace(write=pieces.append)
        try:
            yield
        finally:
            self._cycle.transport = transport
            transport.write(b"".join(pieces))


def _with_body(app: ASGIApp, stalled_s: float) -> ASGIApp:
    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        cycle = send.__self__  # type: ignore[attr-defined]  # a method of uvicorn's cycle
        if scope["path"][:8].lower().startswith(("http://", "https://")):  # as some proxies ask: RFC 9112, 3.2.2
            scope["path"] = "/" + scope["path"].partition("://")[2].partition("/")[2]
        if scope["method"] != "HEAD":  # its answer is a head alone
            scope["extensions"] = {BODY: Body(cycle)}

        async def patiently(message: Message) -> None:
            """It waits while the transport keeps more than it should: what its client does not read."""
            unread = _Unread(cycle.transport, stalled_s)
            try:
                await send(message)
            finally:
                unread.cancel()

        async def in_pieces(message: Message) -> None:
            """The transport would keep a whole answer for as long as its client reads nothing."""
            if message.get("more_body"):
                await send(message)
                return
            body = message.get("body", b"")
            for start in range(0, max(len(body), 1), PIECE_BYTES):
                end = start + PIECE_BYTES
                more = {"body": body[start:end], "more_body": end < len(body)} if len(body) > PIECE_BYTES else {}
                await (patiently if cycle.flow.write_paused else send)({**message, **more})

        await app(scope, receive, in_pieces)

    return call


class _Unread:
    """Cuts off a client that takes longer than `stalled_s` for PIECE_BYTES of what is kept for it."""

    def __init__(self, transport: Any, stalled_s: float, *, until: Callable[[], bool] = lambda: False) -> None:
        """`until`: whether others see to it by now."""
        self._transport, self._stalled_s, self._until = transport, stalled_s, until
        self._kept = _kept(transport)
        self._timer = asyncio.get_running_loop().call_later(stalled_s, self._look)

    def _look(self) -> None:
        before, self._kept = self._kept, _kept(self._transport)
        if not self._kept or self._until():
            return
        if before - self._kept < PIECE_BYTES:
            self._transport.abort()
        else:
            self._timer = asyncio.get_running_loop().call_later(self._stalled_s, self._look)

    def cancel(self) -> None:
        self._timer.cancel()


def _kept(transport: Any) -> int:
    """Bytes for which the kernel has no room yet. Of TLS, asyncio does not count those that are encrypted and on their
    way: they are kept one transport below, which takes no others until it has sent nearly all of them."""
    if not hasattr(transport, "_ssl_protocol"):
        return int(transport.get_write_buffer_size())
    if (tls := transport._ssl_protocol) is None:  # closed twice
        return 0
    below = tls._transport.get_write_buffer_size() if tls._transport else 0
    return int(transport.get_write_buffer_size() + below)


class _Protocol(H11Protocol):
    """Closes a connection over which no request begins, one too many, and one whose client does not read the end of an
    answer. uvicorn itself waits for ever for the first request, for the rest of one that has begun to come, for the
    rest of a body after its answer, and for what is written to be read."""

    def __init__(self, config: uvicorn.Config, state: ServerState, unreadable: bytes, stalled_s: float) -> None:
        super().__init__(config, state, app_state={})
        self._unreadable, self._stalled_s = unreadable, stalled_s
        self._unread: _Unread | None = None
        self._context = copy_context()

    def handle_events(self) -> None:
        # asyncio lends a request's context to the next one of the connection (cpython issue 140947).
        self._context.copy().run(super().handle_events)
        # Bytes behind a whole request wait for its answer. uvicorn stops reading then, so that it would not see the
        # client hang up either.
        whole = self.cycle is not None and not self.cycle.more_body
        if self.flow.read_paused and whole and len(self.conn.trailing_data[0]) <= EARLY_BYTES:
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            self.transport.write(head % len(self._unreadable) + b"connection: close\r\n\r\n" + self._unreadable)
        self.transport.close()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(PIECE_BYTES)  # for TLS, too: asyncio would keep eight times as much there
        self._patience: asyncio.TimerHandle | None = self.loop.call_later(IDLE_S, transport.close)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        if repr(self.conn.their_state) == "MUST_CLOSE":  # h11 would refuse the whole request for what follows
            return
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._patience is None:  # these bytes began no request: one must begin soon
            self._patience = self.loop.call_later(IDLE_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def on_response_complete(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        if _kept(self.transport):
            self._unread = _Unread(self.transport, self._stalled_s, until=self._asked_again)
        super().on_response_complete()

    def _asked_again(self) -> bool:
        return not self.cycle.response_complete

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(exc)


def _bind(host: str, port: int) -> socket.socket:
    listener = None
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(BACKLOG)  # until then another program could have the same port
    except OSError as error:
        if listener is not None:
            listener.close()
        raise OSError(f"cannot listen on {address(host, port)}: {error}") from error
    listener.setblocking(False)
    return listener


def _renewed(current: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """A context that hands each handshake to the one that is current by then."""

    def renew(connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
        connection.context = current()

    context = current()
    context.sni_callback = renew
    return context
