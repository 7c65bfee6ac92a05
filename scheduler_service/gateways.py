"""The gateways' end of the scheduler: one multiplexed stream each. Requests are kept elsewhere."""

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

import structlog

from protos.errors import NotServing, QueueFull, RequestError
from protos.serving import BEAT_S, Stream, abort, first_of
from protos.v1 import gateway_link_pb2 as pb
from protos.v1 import gateway_link_pb2_grpc as rpc
from protos.v1 import inference_pb2 as inference_pb
from protos.v1 import types_pb2 as types_pb
from scheduler_service.insight import request_status
from scheduler_service.store import StoreUnavailable

if TYPE_CHECKING:
    from scheduler_service.leader import Leader

MAX_PENDING = 16_384  # items for one gateway; one that reads so slowly is cut off, and follows again by offset
MAX_ITEMS = 4096  # of a message: far below what gRPC takes


class GatewayOutbox:
    """What one gateway is to be told. Everything of one step goes into one message. Never waits."""

    def __init__(self) -> None:
        self.follows: set[str] = set()
        self._messages = deque([pb.ToGateway()])  # the last one grows
        self._items = 0  # of it
        self._pending = 0
        self._wake = asyncio.Event()
        self._overflowed = asyncio.Event()

    def accepted(self, id: str) -> None:
        self._put().accepted.append(id)

    def refuse(self, id: str, error: RequestError) -> None:
        self.follows.discard(id)
        self._put().refusals.add(
            request_id=id, code=error.code.value[0], message=error.message, retry_after_ms=error.retry_after_ms
        )

    def delta(self, delta: pb.Delta) -> None:
        self._put().deltas.append(delta)
        if delta.HasField("ending"):
            self.follows.discard(delta.request_id)

    def repeat(self, delta: pb.Delta) -> None:
        """Of a request that is followed anew: so much is what the gateway asked for, however slowly it reads."""
        self.delta(delta)
        self._pending -= 1

    def serving(self, serving: pb.Serving) -> None:
        self._put().serving.CopyFrom(serving)

    def _put(self) -> pb.ToGateway:
        self._pending += 1
        if self._pending > MAX_PENDING:
            self._overflowed.set()
        self._wake.set()
        self._items += 1
        if self._items > MAX_ITEMS:
            self._messages.append(pb.ToGateway())
            self._items = 1
        return self._messages[-1]

    async def take(self) -> pb.ToGateway:
        await self._wake.wait()
        message = self._messages.popleft()
        if not self._messages:
            self._messages.append(pb.ToGateway())
            self._items = self._pending = 0
            self._wake.clear()
        return message

    async def overflow(self) -> None:
        """Returns if the gateway reads too slowly."""
        await self._overflowed.wait()


class GatewayLink(rpc.GatewayLinkServicer):
    def __init__(self, leader: "Leader") -> None:
        self._leader = leader
        self._log = structlog.get_logger()

    async def Link(self, requests: Any, context: Any) -> None:  # type: ignore[override] # noqa: N802
        outbox = GatewayOutbox()
        self._leader.link(outbox)
        self._log.info("gateway_linked")
        try:
            await first_of(
                lambda: self._read(outbox, context), lambda: self._write(outbox, context), lambda: _overflow(outbox)
            )
        except RequestError as error:
            self._log.warning("gateway_cut_off", reason=error.message)
            await abort(context, error)
        finally:
            self._leader.unlink(outbox)
            self._log.info("gateway_unlinked")

    async def _read(self, outbox: GatewayOutbox, stream: Stream[pb.FromGateway, pb.ToGateway]) -> None:
        while isinstance(message := await stream.read(), pb.FromGateway):
            try:
                match message.WhichOneof("m"):
                    case "submit":
                        await self._leader.submit(message.submit, outbox)
                    case "follow":
                        await self._leader.follow(message.follow, outbox)
                    case "cancel":
                        await self._leader.cancel(message.cancel.request_id)
            except StoreUnavailable as error:
                away = NotServing(f"the store cannot be reached: {error}", retry_after_ms=1000)
                if message.HasField("cancel"):
                    raise away from error  # the next link says it again
                asked = message.submit if message.HasField("submit") else message.follow
                outbox.refuse(asked.request_id, away)

    async def _write(self, outbox: GatewayOutbox, stream: Stream[pb.FromGateway, pb.ToGateway]) -> None:
        while True:
            try:
                async with asyncio.timeout(BEAT_S):
                    message = await outbox.take()
            except TimeoutError:
                message = pb.ToGateway()
            await stream.write(message)

    async def GetRequest(self, request: inference_pb.GetRequestRequest, context: Any) -> types_pb.RequestStatus:  # noqa: N802
        try:
            return await request_status(self._leader, request.request_id)
        except RequestError as error:
            await abort(context, error)
        except StoreUnavailable as error:
            await abort(context, NotServing(f"the store cannot be reached: {error}", retry_after_ms=1000))
        raise AssertionError("abort raises")

    async def GetSubmission(self, request: inference_pb.GetRequestRequest, context: Any) -> pb.Submit:  # noqa: N802
        try:
            return await self._leader.submission(request.request_id)
        except RequestError as error:
            await abort(context, error)
        except StoreUnavailable as error:
            await abort(context, NotServing(f"the store cannot be reached: {error}", retry_after_ms=1000))
        raise AssertionError("abort raises")

    async def Stats(self, request: inference_pb.StatsRequest, context: Any) -> types_pb.ServerStats:  # noqa: N802
        return self._leader.insight.stats(self._leader, request.requests)


async def _overflow(outbox: GatewayOutbox) -> None:
    await outbox.overflow()
    raise QueueFull("this gateway reads too slowly; link again and follow by offset")
