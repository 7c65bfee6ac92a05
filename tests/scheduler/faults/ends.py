"""Both ends of calls over network.py, as far as our code uses grpc.aio's: channels and calls, servers and contexts.
Nothing is lost or late here."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import grpc

from tests.scheduler.faults.loop import PROCESS, Process
from tests.scheduler.faults.network import UNAVAILABLE, Call, Network, Status


class ClientCall:
    """The client's view, as far as our code uses grpc.aio's."""

    def __init__(self, call: Call, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]) -> None:
        self._call, self._encode, self._decode = call, encode, decode

    async def read(self) -> Any:
        item = await self._call.down.get()
        if isinstance(item, bytes):
            return self._decode(item)
        self._raise(item)
        return grpc.aio.EOF

    @staticmethod
    def _raise(status: Status) -> None:
        code, details, trailers = status
        if code is grpc.StatusCode.CANCELLED:
            raise asyncio.CancelledError
        if code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details=details)

    async def write(self, message: Any) -> None:
        if self._call.down.end is not None:
            raise asyncio.InvalidStateError("RPC already finished.")
        self._call.send(self._call.up, self._encode(message))
        await self._call.up.room()
        await asyncio.sleep(0)

    async def done_writing(self) -> None:
        call = self._call
        if call.alive:
            call.loop.at(call._arrival(call.up), call.up.close, grpc.aio.EOF)

    async def initial_metadata(self) -> tuple[Any, ...]:
        return await asyncio.shield(self._call.metadata)

    async def _status(self) -> Status:
        while self._call.down.end is None:
            await self._call.down.get()
        status: Status = self._call.down.end
        return status

    async def code(self) -> grpc.StatusCode:
        return (await self._status())[0]

    async def details(self) -> str:
        return (await self._status())[1]

    def cancel(self) -> None:
        self._call.cancel()

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    async def answer(self) -> Any:
        """Of a unary call."""
        message = await self.read()
        if message is not grpc.aio.EOF:
            self._raise(await self._status())
        return message


class Channel:
    """What a process dials with."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self._network, self._process, self._address = network, process, address
        self._open: list[ClientCall] = []

    def _dial(self, method: str, encode: Any, decode: Any, timeout: float | None, metadata: object = ()) -> ClientCall:
        call = Call(self._network, self._process, self._address, method)
        call.invocation_metadata = metadata
        if timeout is not None:
            call.deadline = self._network.loop.now + timeout
            self._network.loop.at(call.deadline, call.expire)
        self._open.append(made := ClientCall(call, encode, decode))
        return made

    def get_state(self, *, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """As if every port answered: the call that follows tells whether it does."""
        return grpc.ChannelConnectivity.READY

    def stream_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: object) -> Any:
        return lambda metadata=(): self._dial(method, request_serializer, response_deserializer, None, metadata)

    def unary_stream(self, method: str, request_serializer: Any, response_deserializer: Any, **_: object) -> Any:
        def call(request: Any, timeout: float | None = None, metadata: object = None) -> ClientCall:
            made = self._dial(method, request_serializer, response_deserializer, timeout)
            made._call.send(made._call.up, request_serializer(request))
            return made

        return call

    def unary_unary(self, method: str, request_serializer: Any, response_deserializer: Any, **_: object) -> Any:
        stream = self.unary_stream(method, request_serializer, response_deserializer)
        return lambda request, timeout=None, metadata=None: stream(request, timeout).answer()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        for call in self._open:
            call.cancel()


class Context:
    """The handler's view."""

    def __init__(self, call: Call, decode: Callable[[bytes], Any], encode: Callable[[Any], bytes]) -> None:
        self._call, self._decode, self._encode = call, decode, encode

    async def read(self) -> Any:
        item = await self._call.up.get()
        return self._decode(item) if isinstance(item, bytes) else item

    async def write(self, message: Any) -> None:
        self._call.send(self._call.down, self._encode(message))
        await self._call.down.room()
        await asyncio.sleep(0)

    async def send_initial_metadata(self, metadata: tuple[Any, ...]) -> None:
        call = self._call
        if call.alive:
            call.loop.at(call._arrival(call.down), _set, call.metadata, metadata)

    def invocation_metadata(self) -> object:
        return self._call.invocation_metadata

    def time_remaining(self) -> float | None:
        deadline = self._call.deadline
        return None if deadline is None else max(0.0, deadline - self._call.loop.now)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        self._call.finish((code, details, tuple(trailing_metadata)))
        raise grpc.aio.AbortError


def _set(future: "asyncio.Future[Any]", result: Any) -> None:
    if not future.done():
        future.set_result(result)


class SimServer:
    """In place of protos.serving.Server. It is its own `grpc`."""

    def __init__(self, network: Network, process: Process) -> None:
        self.network, self.process = network, process
        self.handlers: dict[str, Any] = {}
        self.running: dict[Call, None] = {}
        self.open = False
        self.grpc = self

    def add_generic_rpc_handlers(self, handlers: Iterable[object]) -> None:
        """The registered ones are enough."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}

    async def start(self, host: str, port: int) -> int:
        self.open = True
        self.network.listeners[f"{host}:{port}"] = self
        return port

    async def start_health(self, host: str, port: int | None) -> None:
        """Nobody probes here."""
        assert port is None

    async def set_ready(self, ready: bool) -> None:
        await asyncio.sleep(0)

    async def serve(self, call: Call, handler: Any) -> None:
        """Runs a handler as grpc.aio does, and ends the call."""
        context = Context(call, handler.request_deserializer, handler.response_serializer)
        self.running[call] = None
        try:
            if handler.request_streaming:
                await handler.stream_stream(None, context)
            elif handler.response_streaming:
                await handler.unary_stream(await context.read(), context)
            else:
                await context.write(await handler.unary_unary(await context.read(), context))
            call.finish((grpc.StatusCode.OK, "", ()))
        except grpc.aio.AbortError:
            return
        except asyncio.CancelledError:
            call.finish((UNAVAILABLE, "the server has stopped", ()))
        except BaseException as error:
            call.network.failed(f"{self.process.name} {call.method}: {error!r}")
            call.finish((grpc.StatusCode.UNKNOWN, repr(error), ()))
        finally:
            self.running.pop(call, None)

    async def stop(self, grace_s: float) -> None:
        self.open = False
        deadline = self.network.loop.now + grace_s
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await asyncio.gather(*(call.task for call in self.running if call.task), return_exceptions=True)
        for call in list(self.running):
            if call.task is not None:
                call.task.cancel()
        for address in [address for address, server in self.network.listeners.items() if server is self]:
            del self.network.listeners[address]


def current() -> Process:
    process = PROCESS.get()
    assert process is not None
    return process
