"""What every service does alike: channels, servers with health and reflection, signals. No service lives here."""

import asyncio
import inspect
import os
import signal
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from protos.channels import LINK_MESSAGE_BYTES as LINK_MESSAGE_BYTES
from protos.channels import PUBLIC_MESSAGE_BYTES as PUBLIC_MESSAGE_BYTES
from protos.channels import options as options
from protos.errors import BadInput, RequestError

MAX_METADATA_BYTES = 16 << 10
LOST_CANCEL_S = 0.2
BEAT_S = 1.0  # a scheduler sends something on each link at least this often
DIAL_S = 2.0  # until a port answers
MAX_UNSEEN = 10_000  # calls that gRPC has taken and Python has not seen yet; of more some are cancelled without a word
MAX_PROBES = 64  # calls at a time on a port for health alone


def stranger_options(max_streams: int) -> dict[str, int]:
    """Further options for a port that strangers can reach. They bound what one connection costs before any message is
    parsed."""
    return {
        "grpc.max_send_message_length": PUBLIC_MESSAGE_BYTES,
        "grpc.max_metadata_size": MAX_METADATA_BYTES,
        "grpc.absolute_max_metadata_size": MAX_METADATA_BYTES,
        "grpc.max_concurrent_streams": max_streams,
        "grpc.max_connection_idle_ms": 600_000,
        "grpc.server_handshake_timeout_ms": 10_000,
        "grpc.server.max_pending_requests": MAX_UNSEEN,
        "grpc.server.max_pending_requests_hard_limit": MAX_UNSEEN,
        # Our own clients ping every 20 s. A client that pings more often than every 5 s without a call is disconnected.
        "grpc.http2.max_ping_strikes": 2,
        "grpc.http2.min_ping_interval_without_data_ms": 5_000,
    }


def address(host: str, port: int) -> str:
    """HOST:PORT. An IPv6 address is put in brackets, since it has colons itself."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def channel(
    target: str, credentials: grpc.ChannelCredentials | None = None, max_message_bytes: int = LINK_MESSAGE_BYTES
) -> grpc.aio.Channel:
    """A connection to `target`; without credentials it is plaintext."""
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options(max_message_bytes))
    return grpc.aio.secure_channel(target, credentials, options=options(max_message_bytes))


async def dialled(link: grpc.aio.Channel) -> None:
    """Returns once the peer's port has answered or refused; a call then tells which. Raises TimeoutError if neither
    comes within DIAL_S: the machine is gone, or its process hangs."""
    undecided = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)
    async with asyncio.timeout(DIAL_S):
        while (state := link.get_state(try_to_connect=True)) in undecided:
            await link.wait_for_state_change(state)


In_co = TypeVar("In_co", covariant=True)
Out_contra = TypeVar("Out_contra", contravariant=True)


class Stream(Protocol[In_co, Out_contra]):
    """A bidirectional call, as its handler sees it: a part of grpc.aio.ServicerContext."""

    async def read(self) -> In_co | object:
        """The next message. Once the peer has hung up: an object that is no message."""

    async def write(self, message: Out_contra) -> None: ...


class Server:
    """A gRPC server with health checks (grpc.health.v1) and reflection. The service `""` of the health check says
    whether the process lives; each service's own name says whether that service is ready."""

    def __init__(
        self,
        services: Sequence[str],
        max_message_bytes: int,
        credentials: grpc.ServerCredentials | None = None,
        *,
        further_options: Mapping[str, int] | None = None,
        max_calls: int | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        reflect: bool = True,
    ) -> None:
        """Without credentials it is plaintext."""
        chosen = {**dict(options(max_message_bytes)), **(further_options or {})}
        self.grpc = grpc.aio.server(
            options=list(chosen.items()), interceptors=(*interceptors, WellFormed()), maximum_concurrent_rpcs=max_calls
        )
        self.ready = False
        self._services = tuple(services)
        self._credentials = credentials
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        self._probed: grpc.aio.Server | None = None
        if reflect:
            names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self.grpc)

    async def start(self, host: str, port: int) -> int:
        """Bind and serve. Returns the port, which the system chose if `port` is 0. Raises OSError if the port is
        taken."""
        bound = _bind(self.grpc, address(host, port), self._credentials)
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self.set_ready(False)
        await self.grpc.start()
        return bound

    async def start_health(self, host: str, port: int | None) -> int | None:
        """A further port that tells the same health in plaintext, and nothing else: who probes a container or a pod has
        no certificate. Port None: none. Returns the port. Raises OSError if it is taken."""
        if port is None:
            return None
        probed = grpc.aio.server(
            options=options(PUBLIC_MESSAGE_BYTES) + list(stranger_options(MAX_PROBES).items()),
            interceptors=[WellFormed()],
            maximum_concurrent_rpcs=MAX_PROBES,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, probed)
        bound = _bind(probed, address(host, port), None)
        await probed.start()
        self._probed = probed
        return bound

    async def set_ready(self, ready: bool) -> None:
        """What the health check says about every service of this port."""
        self.ready = ready
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in self._services:
            await self._health.set(service, status)

    async def stop(self, grace_s: float) -> None:
        """Calls that run may end within `grace_s` seconds; then they are cancelled."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_s)
        if self._probed is not None:
            await self._probed.stop(0)


def _bind(server: grpc.aio.Server, at: str, credentials: grpc.ServerCredentials | None) -> int:
    """Raises OSError if the port is taken."""
    try:
        return int(server.add_insecure_port(at) if credentials is None else server.add_secure_port(at, credentials))
    except RuntimeError as error:
        raise OSError(f"cannot listen on {at}: {error}") from error


class WellFormed(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc is not typed
    """Bytes that cannot be parsed, as a request or within a stream, end the call with INVALID_ARGUMENT. By default gRPC
    would end it with UNKNOWN and log a traceback."""

    async def intercept_service(self, continuation, details):  # type: ignore[no-untyped-def]
        handler = await continuation(details)
        if handler is None or handler.request_deserializer is None:
            return handler
        parse = handler.request_deserializer

        def parsed(raw: bytes) -> Any:
            try:
                return parse(raw)
            except DecodeError:
                raise BadInput("request", "not a message of the interface") from None

        if handler.request_streaming:
            # A read inside the handler raises BadInput. Our handlers end the call with it; other handlers let it pass.
            behaviour = handler.stream_stream

            async def converse(requests: Any, context: Any) -> None:
                try:
                    if inspect.isasyncgenfunction(behaviour):
                        async for answer in behaviour(requests, context):
                            await context.write(answer)
                    else:
                        await behaviour(requests, context)
                except BadInput as error:
                    await abort(context, error)

            return handler._replace(request_deserializer=parsed, stream_stream=converse)
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        answer = getattr(handler, kind)

        async def call(raw: bytes, context: Any) -> Any:
            try:
                request = parsed(raw)
            except BadInput as error:
                await abort(context, error)
            return await answer(request, context)

        return handler._replace(request_deserializer=None, **{kind: call})


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: RequestError) -> None:
    """End a call with the status of `error` and its details. Never returns: grpc raises AbortError."""
    await context.abort(error.code, error.message, trailing_metadata=error.trailers)


@asynccontextmanager
async def stop_signals() -> AsyncIterator[asyncio.Event]:
    """An event that is set by SIGTERM, SIGINT and SIGHUP (the terminal has gone; unless that is ignored, as under
    nohup), which otherwise would end the process."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    numbers = [signal.SIGTERM, signal.SIGINT]
    for number in numbers:
        loop.add_signal_handler(number, stopping.set)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
        loop.add_signal_handler(signal.SIGHUP, _hang_up, stopping)
    try:
        yield stopping
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _hang_up(stopping: asyncio.Event) -> None:
    """The shell and the system may both say so, which is one signal to us; and no write to that terminal succeeds any
    more."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: None)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(nowhere, descriptor)
    os.close(nowhere)
    stopping.set()


async def first_of(*waits: Callable[[], Awaitable[object]]) -> None:
    """Return when the first of the coroutines returns, or raise what it raises; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait()) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Future[object]]) -> None:
    """Cancel the tasks and return once all have ended. Their errors are ignored. A cancellation of the caller is raised
    then, and not before: a task that nobody waits for is destroyed while it is pending."""
    cancelled: asyncio.CancelledError | None = None
    # More than once, because a library may lose a cancellation; redis-py does while it reads an answer.
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=LOST_CANCEL_S)
        except asyncio.CancelledError as error:
            cancelled = error
    await asyncio.gather(*tasks, return_exceptions=True)
    if cancelled is not None:
        raise cancelled
