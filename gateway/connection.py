"""The one connection to whichever scheduler leads: dialled, watched, dialled again, for ever. What is said on it is
none of its business."""

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeAlias, TypeVar

import grpc
import structlog

from gateway.config import RETRY_AFTER_MS
from gateway.unanswered import Unanswered
from protos import version
from protos.errors import NotServing, from_call
from protos.link.v1 import gateway_link_pb2, gateway_link_pb2_grpc
from protos.outage import Outage
from protos.serving import Stream, channel, dialled, first_of
from protos.silence import Silence
from protos.tls import Tls
from protos.v1 import inference_pb2, status_pb2

BACKOFF_MIN_S = 0.1
BACKOFF_MAX_S = 0.3
START_S = 10.0  # services that start together find each other within this; a gateway that starts alone says so then
GREETING_TIMEOUT_S = 5.0  # until the scheduler's first message
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

Reply = TypeVar("Reply")
Stub: TypeAlias = gateway_link_pb2_grpc.GatewayLinkStub
Call: TypeAlias = Stream[gateway_link_pb2.ToGateway, gateway_link_pb2.FromGateway]
Upward: TypeAlias = "asyncio.Queue[gateway_link_pb2.FromGateway]"


class LinkDown(Exception):
    """The stream ended before the scheduler's first message."""


class Connection:
    """`on_up` is called for each new stream before anything that comes of it is handled, `on_message` for each message,
    `on_down` when a stream that was up has ended."""

    def __init__(
        self,
        schedulers: Sequence[str],
        tls: Tls,
        *,
        queue_size: int,
        rpc_timeout_s: float,
        wants_load: bool = False,
        on_up: Callable[[], Awaitable[None]],
        on_message: Callable[[gateway_link_pb2.ToGateway], Awaitable[None]],
        on_down: Callable[[], Awaitable[None]],
    ) -> None:
        """`schedulers`: HOST:PORT of each. `queue_size`: messages that may wait to be sent. `wants_load`: to be told
        how long a new request would wait."""
        self._metadata = (*version.METADATA, *([(version.LOAD_KEY, "1")] if wants_load else ()))
        self.has_model = ""  # the digest of the model that this gateway has; the scheduler then need not send it
        self._schedulers, self._tls = deque(schedulers), tls
        self._queue_size = queue_size
        self._rpc_timeout_s = rpc_timeout_s
        self._on_up, self._on_message, self._on_down = on_up, on_message, on_down
        self._stub: Stub | None = None  # of the scheduler that leads; None: not connected
        self._upward: Upward | None = None  # messages to be sent; None: not connected
        self.unanswered = Unanswered()
        self._was_up, self._outage = False, Outage()  # up ever
        self._stuck = asyncio.Event()  # more messages than may wait
        self._log = structlog.get_logger()

    def move(self, schedulers: Sequence[str]) -> None:
        """From the next connection on they are at these addresses."""
        if set(schedulers) != set(self._schedulers):
            self._schedulers = deque(schedulers)

    @property
    def up(self) -> bool:
        return self._upward is not None

    def send(self, message: gateway_link_pb2.FromGateway) -> None:
        """Never waits. Without a connection the message is dropped: `on_up` says again what still counts."""
        if self._upward is None or not self.unanswered.sends(message):
            return
        try:
            self._upward.put_nowait(message)
        except asyncio.QueueFull:  # the scheduler does not read; a new connection may find one that does
            self._log.warning("scheduler_does_not_read")
            self._stuck.set()

    async def flush(self, timeout_s: float) -> None:
        """Return when all has been sent, or after `timeout_s`."""
        if self._upward is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._upward.join(), timeout_s)

    # Questions to the scheduler, each a call of its own. They raise NotServing, UnknownRequest.

    async def get_request(self, request: inference_pb2.GetRequestRequest) -> inference_pb2.GetRequestResponse:
        return await self._ask(lambda stub: stub.GetRequest(request, timeout=self._rpc_timeout_s))

    async def submission(self, request_id: str) -> gateway_link_pb2.Submit:
        """The request as a gateway submitted it, without its deadline."""
        request = gateway_link_pb2.GetSubmissionRequest(request_id=request_id)
        return await self._ask(lambda stub: stub.GetSubmission(request, timeout=self._rpc_timeout_s))

    async def list_requests(self, request: inference_pb2.ListRequestsRequest) -> inference_pb2.ListRequestsResponse:
        return await self._ask(lambda stub: stub.ListRequests(request, timeout=self._rpc_timeout_s))

    async def stats(self, request: inference_pb2.StatsRequest) -> status_pb2.StatsResponse:
        return await self._ask(lambda stub: stub.Stats(request, timeout=self._rpc_timeout_s))

    async def drain_worker(self, request: inference_pb2.DrainWorkerRequest) -> inference_pb2.DrainWorkerResponse:
        return await self._ask(lambda stub: stub.DrainWorker(request, timeout=self._rpc_timeout_s))

    async def compare_policies(
        self, request: inference_pb2.ComparePoliciesRequest
    ) -> inference_pb2.ComparePoliciesResponse:
        return await self._ask(lambda stub: stub.ComparePolicies(request, timeout=self._rpc_timeout_s))

    async def _ask(self, call: Callable[[Stub], Awaitable[Reply]]) -> Reply:
        away = unreachable()
        if self._stub is None:
            raise away
        try:
            return await call(self._stub)
        except grpc.aio.AioRpcError as error:
            if error.code() in _AWAY:
                raise away from error
            raise from_call(error) from error
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) and task.cancelling():
                raise
            raise away from None  # the connection broke, and its channel was closed under this call

    # The stream.

    async def run(self) -> None:
        """Keep a stream until cancelled."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            wait_s = BACKOFF_MIN_S
            try:
                await self._converse_with_any()
            except (LinkDown, grpc.aio.AioRpcError) as error:
                self._log_failure(error, loop.time() - began)
                wait_s = random.uniform(BACKOFF_MIN_S, BACKOFF_MAX_S)  # gateways do not come all at once
            await asyncio.sleep(wait_s)

    def _log_failure(self, error: Exception, seconds: float) -> None:
        """`seconds`: since the start. A scheduler that is not there yet, soon after it, is no outage."""
        if not self._was_up and seconds <= START_S:
            return
        reason = version.reason(error, "gateway") if isinstance(error, grpc.aio.AioRpcError) else str(error)
        if self._outage.is_new(reason):
            self._log.warning("not_linked", schedulers=list(self._schedulers), reason=reason)

    async def _converse_with_any(self) -> None:
        """One stream, until it breaks. Raises LinkDown or AioRpcError if none of the schedulers said anything."""
        for others in reversed(range(len(self._schedulers))):
            scheduler = self._schedulers[0]
            self._schedulers.rotate(-1)  # if it fails us now it is asked last
            try:
                async with channel(scheduler, self._tls.channel_credentials()) as link:
                    await _dialled(link)
                    return await self._converse(scheduler, gateway_link_pb2_grpc.GatewayLinkStub(link))
            except (LinkDown, grpc.aio.AioRpcError):
                if not others:
                    raise

    async def _converse(self, scheduler: str, stub: Stub) -> None:
        self._stuck.clear()
        call = stub.Link(metadata=(*self._metadata, *([(version.MODEL_KEY, self.has_model)] if self.has_model else ())))
        try:
            try:
                async with asyncio.timeout(GREETING_TIMEOUT_S):
                    message = await call.read()
            except TimeoutError:
                raise LinkDown("the scheduler does not answer") from None
            if not isinstance(message, gateway_link_pb2.ToGateway):
                raise LinkDown(f"the scheduler closed the link: {await call.details()}")
            self._stub, self._upward = stub, asyncio.Queue(self._queue_size)
            self.unanswered.clear()
            self._was_up = True
            self._outage.over()
            self._log.info("scheduler_linked", scheduler=scheduler)
            await self._on_up()
            await self._on_message(message)
            # A read fails so, a silent scheduler, and a write after the end.
            with suppress(grpc.aio.AioRpcError, TimeoutError, asyncio.InvalidStateError):
                upward, silence = self._upward, Silence()
                await first_of(
                    lambda: self._read(call, silence), lambda: _write(call, upward), self._stuck.wait, silence.lasts
                )
        finally:
            call.cancel()
            if self._upward is not None:
                self._stub = self._upward = None
                ours = (task := asyncio.current_task()) is not None and task.cancelling()  # this gateway ends
                (self._log.info if ours else self._log.warning)("scheduler_lost")
                await self._on_down()

    async def _read(self, call: Call, silence: Silence) -> None:
        """Until the scheduler hangs up."""
        while isinstance(message := await silence.read(call), gateway_link_pb2.ToGateway):
            await self._on_message(message)


async def _dialled(link: grpc.aio.Channel) -> None:
    try:
        await dialled(link)
    except TimeoutError:
        raise LinkDown("the scheduler's port does not answer") from None


async def _write(call: Call, upward: Upward) -> None:
    while True:
        await call.write(await upward.get())
        upward.task_done()


def unreachable() -> NotServing:
    return NotServing("the scheduler cannot be reached", retry_after_ms=RETRY_AFTER_MS)
