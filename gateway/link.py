"""The one stream to the scheduler, kept for ever: submits, follows, cancels up; deltas down to their feeds. No text."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeAlias, TypeVar

import grpc
import structlog
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from gateway.config import RETRY_AFTER_MS
from gateway.feed import MOST_UNREAD, Batch, Feed
from gateway.text import TextModel
from protos import version
from protos.errors import DuplicateRequest, Lost, NotServing, RequestError, UnknownRequest, from_code
from protos.idempotence import content
from protos.serving import SILENT_S, Stream, channel, first_of
from protos.tls import Tls
from protos.v1 import gateway_link_pb2, gateway_link_pb2_grpc, inference_pb2, types_pb2

BACKOFF_MIN_S = 0.1
BACKOFF_MAX_S = 0.3
GREETING_TIMEOUT_S = 5.0  # from dialling to the scheduler's first message
QUEUE_PER_REQUEST = 4  # messages upward that may wait, for each live request
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

Answer = TypeVar("Answer")
Stub: TypeAlias = gateway_link_pb2_grpc.GatewayLinkStub
Call: TypeAlias = Stream[gateway_link_pb2.ToGateway, gateway_link_pb2.FromGateway]


class LinkDown(Exception):
    """The stream ended before the scheduler's first message."""


class Link:
    """`on_ready` is told whenever the scheduler becomes ready, or is no longer (also: cannot be reached)."""

    def __init__(
        self,
        schedulers: Sequence[str],
        tls: Tls,
        *,
        max_requests: int,
        max_unread_tokens: int = MOST_UNREAD,
        reconnect_timeout_s: float,
        rpc_timeout_s: float,
        on_ready: Callable[[bool], Awaitable[None]],
    ) -> None:
        self.ready = False
        self.model: TextModel | None = None
        # Of live requests, those included whose cancel is on its way; several for one that was joined or resumed here.
        self.feeds: dict[str, list[Feed]] = {}
        self._schedulers, self._tls = deque(schedulers), tls
        self._queue_size = QUEUE_PER_REQUEST * max_requests
        self._max_unread_tokens = max_unread_tokens
        self._reconnect_timeout_s = reconnect_timeout_s
        self._rpc_timeout_s = rpc_timeout_s
        self._on_ready = on_ready
        self._stub: Stub | None = None  # of whoever leads; None: not connected
        self._upward: asyncio.Queue[gateway_link_pb2.FromGateway] | None = None  # None: not connected
        self._stuck = asyncio.Event()  # the queue upward is full
        self._give_up: asyncio.TimerHandle | None = None
        self._patient_until = 0.0  # until then a request that outlived a connection is not refused, but asked again
        self._log = structlog.get_logger()

    # What the service does with it.

    def submit(self, submit: gateway_link_pb2.Submit) -> Feed:
        """Send a request and register its feed; one of the same id and content that is live here is joined.

        Raises NotServing while there is no connection, DuplicateRequest.
        """
        if (live := self.feeds.get(submit.request_id)) is None:
            feed = self._register(Feed(submit, most=self._max_unread_tokens))
            self._send(gateway_link_pb2.FromGateway(submit=submit))
            return feed
        if content(live[0].submit) != content(submit):
            raise DuplicateRequest(f"request_id: {submit.request_id} is taken by another request")
        known = any(other.accepted for other in live)
        feed = Feed(live[0].submit, follows=True, accepted=known, most=self._max_unread_tokens)
        if known:
            return self._join(feed)
        # Whether the scheduler knows the request is not known: it may have refused it, and be asked again only later.
        self._register(feed)
        self._send(gateway_link_pb2.FromGateway(submit=feed.submit))
        return feed

    def follow(self, submit: gateway_link_pb2.Submit) -> Feed:
        """A further feed of a request that the scheduler has, from its first token. Raises NotServing."""
        feed = Feed(submit, follows=True, accepted=True, most=self._max_unread_tokens)
        for other in self.feeds.get(submit.request_id, []).copy():
            if content(other.submit) != content(submit):  # it must not be told of tokens that are not its own
                self._remove(other)
                other.fail(DuplicateRequest(f"request_id: {submit.request_id} is taken by another request"))
        return self._join(feed)

    def _join(self, feed: Feed) -> Feed:
        self._register(feed)
        self._follow(feed)
        return feed

    def _register(self, feed: Feed) -> Feed:
        if self._upward is None:
            raise NotServing("the scheduler cannot be reached", retry_after_ms=RETRY_AFTER_MS)
        self.feeds.setdefault(feed.request_id, []).append(feed)
        return feed

    def cancel(self, request_id: str) -> None:
        """End a request at once, and surely: one that is live here is cancelled again after a broken connection, and
        one that is not acknowledged once it is, for until then its id may turn out to be another's.

        Raises NotServing if that cannot be promised: not live here, and no connection.
        """
        if (feeds := self.feeds.get(request_id)) is not None:
            for feed in feeds:
                feed.cancelled = True
            if not any(feed.accepted for feed in feeds):
                return
        elif self._upward is None:
            raise NotServing("the scheduler cannot be reached", retry_after_ms=RETRY_AFTER_MS)
        self._send(gateway_link_pb2.FromGateway(cancel=gateway_link_pb2.Cancel(request_id=request_id)))

    async def take(self, feed: Feed) -> Batch:
        """What has come for it, once there is something. Raises RequestError once it has failed."""
        if feed.catch_up():
            self._follow(feed)
        return await feed.take()

    def leave(self, feed: Feed) -> None:
        """Its stream is over. Work that nobody here waits for any more is ended, unless it was to run on: because its
        client said so, or because it was us who broke off, and told the client to try again."""
        feeds = self.feeds.get(feed.request_id, [])
        if feed not in feeds:
            return  # it ended
        feed.leave()
        if feed.ended or len(feeds) > 1:
            self._remove(feed)
        elif feed.submit.on_disconnect != types_pb2.ON_DISCONNECT_DETACH and not feed.forsaken:
            if feed.bounded:
                self._follow(feed)  # else nobody might tell us of its end
            self.cancel(feed.request_id)
        elif feed.accepted or feed.failed:
            self._remove(feed)
        else:
            feed.abandoned = True  # until it is acknowledged: a connection that breaks now must not lose it

    def _remove(self, feed: Feed) -> None:
        self.feeds[feed.request_id].remove(feed)
        if not self.feeds[feed.request_id]:
            del self.feeds[feed.request_id]

    def fail_all(self, error: RequestError) -> None:
        """Tell every live request's stream, not the scheduler."""
        for feed in self._every_feed():
            feed.fail(error)

    def _every_feed(self) -> list[Feed]:
        return [feed for feeds in self.feeds.values() for feed in feeds]

    async def flush(self, timeout_s: float) -> None:
        """Return when all has been sent, or after `timeout_s`."""
        if self._upward is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._upward.join(), timeout_s)

    async def get_request(self, request: inference_pb2.GetRequestRequest) -> types_pb2.RequestStatus:
        return await self._ask(lambda stub: stub.GetRequest(request, timeout=self._rpc_timeout_s))

    async def submission(self, request_id: str) -> gateway_link_pb2.Submit:
        """As some gateway sent it, but for its deadline. Raises UnknownRequest, NotServing."""
        request = inference_pb2.GetRequestRequest(request_id=request_id)
        return await self._ask(lambda stub: stub.GetSubmission(request, timeout=self._rpc_timeout_s))

    async def stats(self, request: inference_pb2.StatsRequest) -> types_pb2.ServerStats:
        return await self._ask(lambda stub: stub.Stats(request, timeout=self._rpc_timeout_s))

    async def _ask(self, call: Callable[[Stub], Awaitable[Answer]]) -> Answer:
        away = NotServing("the scheduler cannot be reached", retry_after_ms=RETRY_AFTER_MS)
        if self._stub is None:
            raise away
        try:
            return await call(self._stub)
        except grpc.aio.AioRpcError as error:
            if error.code() in _AWAY:
                raise away from error
            raise from_code(error.code().value[0], error.details() or error.code().name) from error
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) and task.cancelling():
                raise
            raise away from None  # the channel was closed under the call: the link has just broken

    # The connection.

    async def run(self) -> None:
        """Keep the stream until cancelled."""
        try:
            while True:
                # An attempt that got through ends its series without an exception: the next one starts afresh.
                async for attempt in AsyncRetrying(
                    retry=retry_if_exception_type((LinkDown, grpc.aio.AioRpcError)),
                    wait=wait_random_exponential(multiplier=BACKOFF_MIN_S, min=BACKOFF_MIN_S, max=BACKOFF_MAX_S),
                    before_sleep=self._log_failure,
                ):
                    with attempt:
                        await self._converse_with_any()
                await asyncio.sleep(BACKOFF_MIN_S)
        finally:
            if self._give_up is not None:
                self._give_up.cancel()

    def _log_failure(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        if state.attempt_number == 1:  # one line an outage
            reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
            self._log.warning("not_linked", schedulers=list(self._schedulers), reason=reason)

    async def _converse_with_any(self) -> None:
        """One stream, until it breaks. Raises LinkDown or AioRpcError if none of the schedulers said anything."""
        for others in reversed(range(len(self._schedulers))):
            scheduler = self._schedulers[0]
            self._schedulers.rotate(-1)  # whoever fails us now is asked last
            try:
                async with channel(scheduler, self._tls.channel_credentials()) as link:
                    return await self._converse(scheduler, gateway_link_pb2_grpc.GatewayLinkStub(link))
            except (LinkDown, grpc.aio.AioRpcError):
                if not others:
                    raise

    async def _converse(self, scheduler: str, stub: Stub) -> None:
        upward: asyncio.Queue[gateway_link_pb2.FromGateway] = asyncio.Queue(self._queue_size)
        self._stuck.clear()
        call = stub.Link(metadata=version.METADATA)
        try:
            try:
                async with asyncio.timeout(GREETING_TIMEOUT_S):
                    message = await call.read()
            except TimeoutError:
                raise LinkDown("the scheduler does not answer") from None
            if not isinstance(message, gateway_link_pb2.ToGateway):
                raise LinkDown(f"the scheduler closed the link: {await call.details()}")
            self._stub = stub
            self._log.info("scheduler_linked", scheduler=scheduler, live=len(self.feeds))
            self._connected(upward)
            await self._receive(message)
            # Of a read; of a write after the end; of a silence.
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
                await first_of(lambda: self._read(call), lambda: _write(call, upward), self._stuck.wait)
        finally:
            call.cancel()
            await self._disconnected()

    async def _read(self, call: Call) -> None:
        while True:
            async with asyncio.timeout(SILENT_S):
                message = await call.read()
            if not isinstance(message, gateway_link_pb2.ToGateway):
                return  # it hung up
            await self._receive(message)

    def _connected(self, upward: "asyncio.Queue[gateway_link_pb2.FromGateway]") -> None:
        self._upward = upward
        if self._give_up is not None:
            self._give_up.cancel()
            self._give_up = None
        self._patient_until = asyncio.get_running_loop().time() + self._reconnect_timeout_s
        feeds = self._every_feed()
        if accepted := [feed for feed in feeds if feed.accepted]:
            for feed in accepted:
                feed.on_new_link()
            follows = gateway_link_pb2.Follows(follow=[feed.follow() for feed in accepted])
            self._send(gateway_link_pb2.FromGateway(follows=follows))
        for feed in feeds:
            if not feed.accepted:
                self._resume(feed)
            elif feed.cancelled:
                self.cancel(feed.request_id)

    async def _disconnected(self) -> None:
        if self._upward is None:
            return
        self._upward = self._stub = None
        self._log.warning("scheduler_lost", live=len(self.feeds))
        self._give_up = asyncio.get_running_loop().call_later(self._reconnect_timeout_s, self._lost)
        await self._set_ready(False)

    def _lost(self) -> None:
        self.fail_all(NotServing(f"the scheduler could not be reached for {self._reconnect_timeout_s:g} s"))

    def _resume(self, feed: Feed) -> None:
        """Say again what the scheduler may not know: an unacknowledged submission, else where to go on from."""
        if feed not in self.feeds.get(feed.request_id, []):
            return
        feed.on_new_link()
        if feed.accepted:
            self._follow(feed)
            if feed.cancelled:
                self.cancel(feed.request_id)
        else:
            self._send(gateway_link_pb2.FromGateway(submit=feed.submit))

    def _follow(self, feed: Feed) -> None:
        self._send(gateway_link_pb2.FromGateway(follow=feed.follow()))

    def _send(self, message: gateway_link_pb2.FromGateway) -> None:
        if self._upward is None:
            return  # the next connection says it again
        try:
            self._upward.put_nowait(message)
        except asyncio.QueueFull:
            # A scheduler that does not read: the next connection starts with the present state of every request.
            self._log.warning("scheduler_does_not_read")
            self._stuck.set()

    # What comes down.

    async def _receive(self, message: gateway_link_pb2.ToGateway) -> None:
        if message.HasField("serving"):
            await self._serve(message.serving)
        for request_id in message.accepted:
            for feed in self.feeds.get(request_id, []).copy():
                feed.accept()
                if feed.cancelled:
                    self.cancel(request_id)
                if feed.abandoned:
                    self._remove(feed)
        for refusal in message.refusals:
            for feed in self.feeds.get(refusal.request_id, []).copy():
                self._refuse(feed, refusal)
        for delta in message.deltas:
            for feed in self.feeds.get(delta.request_id, []).copy():
                self._put(feed, delta)

    def _put(self, feed: Feed, delta: gateway_link_pb2.Delta) -> None:
        if not feed.accepted:
            return  # of another's, who was here before it, and has its id: its own come after the acknowledgement
        if not feed.put(delta):
            self._log.warning("delta_gap", request_id=delta.request_id, at=feed.received, got=delta.start)
            self._follow(feed)
        if feed.ended:
            self._remove(feed)

    def _refuse(self, feed: Feed, refusal: gateway_link_pb2.Refusal) -> None:
        error = from_code(refusal.code, refusal.message, refusal.retry_after_ms)
        loop = asyncio.get_running_loop()
        if feed.resumed and isinstance(error, NotServing) and loop.time() < self._patient_until:
            # A scheduler that has just come up may still wait for its workers, or for Redis.
            loop.call_later(max(refusal.retry_after_ms / 1000, BACKOFF_MIN_S), self._resume, feed)
        else:
            if feed.accepted and isinstance(error, DuplicateRequest):
                self._follow(feed)  # another's submission under this id was refused, and whoever had followed that
                return
            if feed.accepted and isinstance(error, UnknownRequest):
                error = Lost(f"the scheduler no longer knows the request: {error.message}")
            self._remove(feed)
            feed.fail(error)

    async def _serve(self, serving: gateway_link_pb2.Serving) -> None:
        if serving.HasField("model") and (self.model is None or self.model.fingerprint != serving.model.fingerprint):
            try:
                self.model = await asyncio.to_thread(TextModel, serving.model)
            except ValueError as error:
                self._log.error("model_unusable", reason=str(error))
                self.model = None
            else:
                self._log.info("model", name=self.model.name, fingerprint=self.model.fingerprint)
        await self._set_ready(serving.ready and self.model is not None)

    async def _set_ready(self, ready: bool) -> None:
        if ready != self.ready:
            self.ready = ready
            self._log.info("readiness", ready=ready)
            await self._on_ready(ready)


async def _write(call: Call, upward: "asyncio.Queue[gateway_link_pb2.FromGateway]") -> None:
    while True:
        await call.write(await upward.get())
        upward.task_done()
