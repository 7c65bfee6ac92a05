"""The streams of gateways: one multiplexed stream for each. Requests are kept elsewhere."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import structlog

from protos import version
from protos.errors import NotServing, QueueFull, RequestError
from protos.link.v1 import gateway_link_pb2 as pb
from protos.link.v1 import gateway_link_pb2_grpc as rpc
from protos.serving import BEAT_S, Stream, abort, first_of
from protos.v1 import inference_pb2 as inference_pb
from protos.v1 import status_pb2 as status_pb
from scheduler_service import insight
from scheduler_service.leader import Leader
from scheduler_service.outbox import GatewayOutbox
from scheduler_service.pace import CANCEL, MESSAGE, MESSAGES, SUBMISSION, Questions, Turns
from scheduler_service.store import StoreUnavailable

Answer = TypeVar("Answer")
Asked: TypeAlias = pb.Submit | pb.Follow
# Between two messages to a gateway. A write costs as much as several rows, and with many gateways each step has a few
# rows for each of them. The first message after a pause goes out at once.
FLUSH_S = 0.003
MAX_LOOK_UPS = 4096  # submissions and follows of one gateway that wait for the store


class GatewayLink(rpc.GatewayLinkServicer):
    def __init__(self, leads: Callable[[], Leader]) -> None:
        """`leads` returns the leader, or raises NotServing if nobody leads in this process."""
        self._leads = leads
        self._questions = Questions()
        self._turns = Turns(MESSAGES)  # what comes while a message waits for its turn goes out in it
        self._log = structlog.get_logger()

    async def Link(self, requests: Any, context: Any) -> None:  # type: ignore[override] # noqa: N802
        try:
            version.agree(*version.of_metadata(context.invocation_metadata()), "gateway")
            leader = self._leads()
        except RequestError as error:
            await abort(context, error)
            return
        said = dict(context.invocation_metadata() or ())
        outbox = GatewayOutbox(wants_load=version.LOAD_KEY in said, has_model=str(said.get(version.MODEL_KEY, "")))
        look_ups: asyncio.Queue[Asked] = asyncio.Queue(MAX_LOOK_UPS)
        leader.requests.link(outbox)
        self._log.info("gateway_linked")
        try:
            await first_of(
                lambda: _read(leader, outbox, look_ups, context),
                lambda: _look_up(leader, outbox, look_ups),
                lambda: _write(leader, outbox, self._turns, context),
                lambda: _overflow(outbox),
                leader.over.wait,
                leader.links_ended.wait,
            )
        except RequestError as error:
            self._log.warning("gateway_cut_off", reason=error.message)
            await abort(context, error)
        finally:
            leader.requests.unlink(outbox)
            self._log.info("gateway_unlinked")

    async def GetRequest(  # noqa: N802
        self, request: inference_pb.GetRequestRequest, context: Any
    ) -> inference_pb.GetRequestResponse:
        async def status(leader: Leader) -> inference_pb.GetRequestResponse:
            async with self._questions.one():
                live = await insight.live_status(leader, request.request_id)
            status = live or await insight.stored_status(leader, request.request_id)
            return inference_pb.GetRequestResponse(request=status)

        return await self._answer(context, status)

    async def ListRequests(  # noqa: N802
        self, request: inference_pb.ListRequestsRequest, context: Any
    ) -> inference_pb.ListRequestsResponse:
        async def page(leader: Leader) -> inference_pb.ListRequestsResponse:
            async with self._questions.one():
                return await insight.list_requests(leader, request)

        return await self._answer(context, page)

    async def GetSubmission(self, request: pb.GetSubmissionRequest, context: Any) -> pb.Submit:  # noqa: N802
        return await self._answer(context, lambda leader: leader.requests.submission(request.request_id))

    async def Stats(self, request: inference_pb.StatsRequest, context: Any) -> status_pb.StatsResponse:  # noqa: N802
        async def stats(leader: Leader) -> status_pb.StatsResponse:
            async with self._questions.one():
                return await insight.stats(leader)

        return await self._answer(context, stats)

    async def DrainWorker(  # noqa: N802
        self, request: inference_pb.DrainWorkerRequest, context: Any
    ) -> inference_pb.DrainWorkerResponse:
        async def drain(leader: Leader) -> inference_pb.DrainWorkerResponse:
            remaining = leader.workers.drain(request.worker_id, force=request.force)
            return inference_pb.DrainWorkerResponse(remaining=remaining)

        return await self._answer(context, drain)

    async def ComparePolicies(  # noqa: N802
        self, request: inference_pb.ComparePoliciesRequest, context: Any
    ) -> inference_pb.ComparePoliciesResponse:
        async def compared(leader: Leader) -> inference_pb.ComparePoliciesResponse:
            return insight.compare_policies(leader)

        return await self._answer(context, compared)

    async def _answer(self, context: Any, ask: Callable[[Leader], Awaitable[Answer]]) -> Answer:
        try:
            return await ask(self._leads())
        except RequestError as error:
            await abort(context, error)
        except StoreUnavailable as error:
            await abort(context, _away(error))
        raise AssertionError("abort raises")


async def _read(
    leader: Leader, outbox: GatewayOutbox, look_ups: asyncio.Queue[Asked], stream: Stream[pb.FromGateway, Any]
) -> None:
    while isinstance(message := await stream.read(), pb.FromGateway):
        match message.WhichOneof("kind"):
            case "submit":
                await leader.turns.room(SUBMISSION)
                await _ask(leader, message.submit, outbox, look_ups)
            case "follow":
                await _ask(leader, message.follow, outbox, look_ups)
            case "follows":
                for follow in message.follows.follow:
                    await _ask(leader, follow, outbox, look_ups)
            case "cancel":
                await leader.turns.room(CANCEL)
                leader.requests.cancel(message.cancel.request_id)


async def _ask(leader: Leader, asked: Asked, outbox: GatewayOutbox, look_ups: asyncio.Queue[Asked]) -> None:
    """What only the store can answer is looked up beside the reader: a store that hangs must not hold up others."""
    if leader.requests.needs_store(asked):
        try:
            look_ups.put_nowait(asked)
        except asyncio.QueueFull:
            outbox.refuse(asked.request_id, NotServing("too many wait for the store", retry_after_ms=1000))
    else:
        await _tell(leader, asked, outbox)


async def _look_up(leader: Leader, outbox: GatewayOutbox, look_ups: asyncio.Queue[Asked]) -> None:
    """Where the store cannot be reached for two in a row nobody is kept waiting: all that need it are to come again."""
    in_vain, error = 0, None
    while True:
        asked = await look_ups.get()
        needs_store = leader.requests.needs_store(asked)  # recovery may have read it meanwhile
        if needs_store and in_vain == 2 and error:
            outbox.refuse(asked.request_id, error)
        elif needs_store:
            error = await _tell(leader, asked, outbox)
            in_vain = in_vain + 1 if error else 0
        else:
            await _tell(leader, asked, outbox)
        if look_ups.empty():
            in_vain = 0


async def _tell(leader: Leader, asked: Asked, outbox: GatewayOutbox) -> NotServing | None:
    """Returns why the store could not be reached, if it had to be asked."""
    try:
        if isinstance(asked, pb.Submit):
            await leader.requests.submit(asked, outbox)
        else:
            await leader.requests.follow(asked, outbox)
    except StoreUnavailable as unavailable:  # also for one that was known, and was forgotten while it waited its turn
        error = _away(unavailable)
        outbox.refuse(asked.request_id, error)
        return error
    return None


async def _write(leader: Leader, outbox: GatewayOutbox, turns: Turns, stream: Stream[Any, pb.ToGateway]) -> None:
    while True:
        try:
            async with asyncio.timeout(BEAT_S):
                await outbox.filled.wait()
                await turns.room()
        except TimeoutError:
            message = pb.ToGateway()
        else:
            message = outbox.take()
            leader.turns.take(MESSAGE)
        if (model := outbox.unsent_model(message)) is not None:
            async with leader.outboxes.one_model:  # megabytes: others run before the next gateway gets its copy
                message.serving.model.CopyFrom(model)
                await asyncio.sleep(0)
        await stream.write(message)
        await asyncio.sleep(FLUSH_S)


def _away(error: StoreUnavailable) -> NotServing:
    return NotServing(f"the store cannot be reached: {error}", retry_after_ms=1000)


async def _overflow(outbox: GatewayOutbox) -> None:
    await outbox.overflow()
    raise QueueFull("this gateway reads too slowly; link again and follow by offset")
