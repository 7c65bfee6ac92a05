"""The talk of this gateway and the scheduler about the live streams. Which state a stream is in, and what is
said for it, stream_states.py decides; how the connection is kept, connection.py."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import structlog

from gateway.connection import BACKOFF_MIN_S, Connection, unreachable
from gateway.feed import JUMPS_OF_A_FOLLOW, MOST_UNREAD, Batch, Feed
from gateway.stream_states import Event, Flow
from gateway.text import TextModel
from gateway.unanswered import taken
from protos.errors import DuplicateRequest, Lost, NotServing, RequestError, UnknownRequest, from_code
from protos.idempotence import same
from protos.link.v1 import gateway_link_pb2
from protos.tls import Tls
from protos.v1 import types_pb2

QUEUE_PER_REQUEST = 4  # messages that may wait to be sent, for each live request
AT_ONCE = 32  # streams that are handled in one turn of the event loop: each wakes a call that makes text of tokens
NOBODY: Sequence[Feed] = ()  # reads a request that is not live here
DELTAS_AT_ONCE = 256  # the same for deltas, which may all be of one stream


class Link:
    """The streams of this gateway, and their link to the scheduler."""

    def __init__(
        self,
        schedulers: Sequence[str],
        tls: Tls,
        *,
        max_requests: int,
        max_unread_tokens: int = MOST_UNREAD,
        reconnect_timeout_s: float,
        rpc_timeout_s: float,
        on_ready: Callable[[], Awaitable[None]],
        wants_load: bool = False,
    ) -> None:
        """`on_ready` is called when `ready` or `refuses` (its store does) changes. `wants_load`: as in Connection."""
        self.ready = self.refuses = False
        self.lost = False  # away for so long that the clients of all streams were told: nobody reads here
        self.model: TextModel | None = None
        # The live streams, by request. A request has several if it was resumed here, or submitted here again.
        self.feeds: dict[str, list[Feed]] = {}
        self.scheduler = Connection(
            schedulers,
            tls,
            queue_size=QUEUE_PER_REQUEST * max_requests,
            rpc_timeout_s=rpc_timeout_s,
            wants_load=wants_load,
            on_up=self._linked,
            on_message=self._receive,
            on_down=self._unlinked,
        )
        self._max_unread_tokens = max_unread_tokens
        self._reconnect_timeout_s = reconnect_timeout_s
        self._on_ready = on_ready
        self._load = gateway_link_pb2.Load()  # of the scheduler, as it last said
        self._sent = 0  # requests since then
        self._link_number = 0
        self._give_up: asyncio.TimerHandle | None = None
        self._giving_up: asyncio.Future[None] | None = None  # kept, since the event loop does not keep it
        self._patient_until = 0.0  # until then a stream that is older than the link is not refused, but asked for again
        self._log = structlog.get_logger()

    async def run(self) -> None:
        """Keep the link until cancelled; then the clients of all streams are told."""
        try:
            await self.scheduler.run()
        finally:
            self._stop_countdown()
            await self.give_up(unreachable())

    # Steps of the clients.

    def submit(self, submit: gateway_link_pb2.Submit) -> Feed:
        """A stream of a new request. If the same request is live here already, a further stream of that one. Raises
        NotServing while there is no connection; DuplicateRequest if another request has the id."""
        if not (live := self.feeds.get(submit.request_id, [])):
            self.scheduler.unanswered.check(submit.request_id)
            return self._open(submit)
        if not same(live[0].submit, submit):
            raise taken(submit.request_id)
        # While none is accepted the scheduler may not have it: it may have refused it, to be asked again only later.
        return self._open(live[0].submission(), accepted=any(feed.life.accepted for feed in live))

    def follow(self, submit: gateway_link_pb2.Submit) -> Feed:
        """A stream, from the first token on, of a request that the scheduler has. Raises NotServing."""
        for other in self.feeds.get(submit.request_id, []).copy():
            if not same(other.submit, submit):  # its client must not get the tokens of this request
                self._tell(other, Event.REFUSE, taken(submit.request_id))
        return self._open(submit, accepted=True)

    def wait(self, priority: int, gateways: int = 1) -> tuple[bool, float]:
        """How long a new request would wait, to be compared with other cells': whether no slot is vacant, and then the
        seconds of work. What was sent since the scheduler spoke counts, as if by `gateways`. `priority`: 0 is best."""
        waits_s = self._load.backlog_s
        if priority >= len(waits_s):
            return True, float(len(self.feeds))
        return gateways * self._sent >= self._load.free_slots, waits_s[priority] + self._sent * self._load.request_s

    def _open(self, submit: gateway_link_pb2.Submit, *, accepted: bool = False) -> Feed:
        if not self.scheduler.up:
            raise unreachable()
        feed = Feed(submit, accepted=accepted, most=self._max_unread_tokens, link_number=self._link_number)
        self.feeds.setdefault(feed.request_id, []).append(feed)
        self._tell(feed, Event.LINK)
        self._sent += not accepted
        return feed

    def cancel(self, request_id: str) -> None:
        """End a request, and surely: while it is live here, the cancel is said again after a broken connection. Raises
        NotServing if it is not live here and there is no connection."""
        if not (feeds := self.feeds.get(request_id, [])) and not self.scheduler.up:
            raise unreachable()
        messages = [message for feed in feeds for message in feed.on(Event.CANCEL)]
        if not feeds:
            messages = [gateway_link_pb2.FromGateway(cancel=gateway_link_pb2.Cancel(request_id=request_id))]
        for message in messages[:1]:  # one is enough, for however many streams
            self.scheduler.send(message)

    async def take(self, feed: Feed) -> Batch:
        """Wait for output of a stream and return it. Raises RequestError once the stream has failed."""
        self._say(feed, feed.want())
        return await feed.take()

    def leave(self, feed: Feed) -> None:
        """The client takes no more from this stream, nor what is in its buffer.

        A request that no other stream here reads is cancelled, unless its client wants it to run on. A stream that the
        gateway itself gave up is no longer live: its client was told to try again, and must find the request.
        """
        feed.drop()
        if not (feed.life.live and feed.life.read):
            return
        if len(self.feeds[feed.request_id]) > 1 or feed.flow is Flow.BEHIND_ENDED:
            self._tell(feed, Event.STEP_ASIDE)
        elif feed.submit.on_disconnect == types_pb2.ON_DISCONNECT_DETACH:
            self._tell(feed, Event.DETACH)
        else:
            self._tell(feed, Event.HANG_UP)

    async def give_up(self, error: RequestError) -> None:
        """Tell the client of every live stream; the requests run on."""
        async for feeds in self._every_feed():
            for feed in feeds:
                self._tell(feed, Event.GIVE_UP, error)

    async def _every_feed(self) -> AsyncIterator[list[Feed]]:
        """The live streams, a few in each turn of the event loop."""
        everything = [feed for feeds in self.feeds.values() for feed in feeds]
        for start in range(0, len(everything), AT_ONCE):
            yield [feed for feed in everything[start : start + AT_ONCE] if feed.life.live]
            await asyncio.sleep(0)

    # Messages to the scheduler.

    def _tell(self, feed: Feed, event: Event, error: RequestError | None = None) -> None:
        self._say(feed, feed.on(event, error))
        self._forget_if_over(feed)

    def _say(self, feed: Feed, messages: Sequence[gateway_link_pb2.FromGateway]) -> None:
        for message in messages:
            if message.HasField("follow"):
                self._expect_jumps(feed)
            self.scheduler.send(message)

    def _expect_jumps(self, feed: Feed) -> None:
        """Output that one stream asks for comes for the other streams of its request too."""
        for other in self.feeds[feed.request_id]:
            if other is not feed:
                other.stray_jumps += JUMPS_OF_A_FOLLOW

    def _forget_if_over(self, feed: Feed) -> None:
        if not feed.life.live:
            self.feeds[feed.request_id].remove(feed)
            if not self.feeds[feed.request_id]:
                del self.feeds[feed.request_id]

    async def _linked(self) -> None:
        self._link_number += 1
        self.lost = False
        self._stop_countdown()
        self._patient_until = asyncio.get_running_loop().time() + self._reconnect_timeout_s
        async for feeds in self._every_feed():
            self._introduce(feeds)

    def _introduce(self, feeds: Sequence[Feed]) -> None:
        """Their follows go in one message: a message for each would keep a new leader from its work."""
        said = [message for feed in feeds for message in feed.on(Event.LINK)]
        if follows := [message.follow for message in said if message.HasField("follow")]:
            for feed in feeds:
                self._expect_jumps(feed)
            self.scheduler.send(gateway_link_pb2.FromGateway(follows=gateway_link_pb2.Follows(follow=follows)))
        for message in said:
            if not message.HasField("follow"):
                self.scheduler.send(message)

    def _ask_again(self, feed: Feed) -> None:
        feed.asked_later = False
        if feed.life.live:
            self._tell(feed, Event.LINK)

    async def _unlinked(self) -> None:
        self._give_up = asyncio.get_running_loop().call_later(self._reconnect_timeout_s, self._give_up_all)
        await self._set_ready(False)

    def _give_up_all(self) -> None:
        self.lost = True
        error = NotServing(f"the scheduler could not be reached for {self._reconnect_timeout_s:g} s")
        self._giving_up = asyncio.ensure_future(self.give_up(error))

    def _stop_countdown(self) -> None:
        if self._give_up is not None:
            self._give_up.cancel()

    # Messages from the scheduler.

    async def _receive(self, message: gateway_link_pb2.ToGateway) -> None:
        if message.HasField("serving"):
            await self._serve(message.serving)
        told, last = 0, NOBODY
        for request_id in message.accepted:
            for feed in self.feeds.get(request_id, []).copy():
                self._tell(feed, Event.ACCEPT)
            self.scheduler.unanswered.heard(request_id)
            told = await _pause(told + 1)
        for refusal in message.refusals:
            for feed in self.feeds.get(refusal.request_id, []).copy():
                self._refuse(feed, refusal)
            self.scheduler.unanswered.heard(refusal.request_id)
            told = await _pause(told + 1)
        for count, delta in enumerate(message.deltas, 1):
            feeds = self.feeds.get(delta.request_id, NOBODY)
            if feeds is not last:
                self._hand_over(last)
                told, last = told + 1, feeds
            for feed in tuple(feeds):
                self._put(feed, delta)
            if told >= AT_ONCE or count % DELTAS_AT_ONCE == 0:
                self._hand_over(last)
                told = await _pause(AT_ONCE)
        self._hand_over(last)

    def _put(self, feed: Feed, delta: gateway_link_pb2.Delta) -> None:
        if messages := feed.put(delta):
            self._log.warning("delta_gap", request_id=delta.request_id, at=feed.received, got=delta.start)
            self._say(feed, messages)
        if not feed.life.live:
            self._forget_if_over(feed)

    def _hand_over(self, feeds: Sequence[Feed]) -> None:
        for feed in tuple(feeds):
            if messages := feed.hand_over():
                self._say(feed, messages)

    def _refuse(self, feed: Feed, refusal: gateway_link_pb2.Refusal) -> None:
        error = from_code(refusal.code, refusal.message, round(refusal.retry_after_s * 1000))
        loop = asyncio.get_running_loop()
        if feed.link_number < self._link_number and isinstance(error, NotServing) and loop.time() < self._patient_until:
            # A new scheduler may still wait for its workers, or its store. Each stream hears what is told to others.
            if not feed.asked_later:
                feed.asked_later = True
                loop.call_later(max(refusal.retry_after_s, BACKOFF_MIN_S), self._ask_again, feed)
        elif feed.life.accepted and isinstance(error, DuplicateRequest):
            self._tell(feed, Event.DISPLACE)
        else:
            if feed.life.accepted and isinstance(error, UnknownRequest):
                error = Lost(f"the scheduler no longer knows the request: {error.message}")
            self._tell(feed, Event.REFUSE, error)

    async def _serve(self, serving: gateway_link_pb2.Serving) -> None:
        if serving.HasField("model") and (self.model is None or self.model.info != serving.model):
            try:
                self.model = await asyncio.to_thread(TextModel, serving.model)
                self._log.info("model", name=self.model.name, fingerprint=self.model.fingerprint)
            except ValueError as error:
                self._log.error("model_unusable", reason=str(error))
                self.model = None
            self.scheduler.has_model = self.model.digest if self.model else ""
        if serving.HasField("load"):
            self._load, self._sent = serving.load, 0
        await self._set_ready(serving.ready and self.model is not None, serving.refuses)

    async def _set_ready(self, ready: bool, refuses: bool = False) -> None:
        if (ready, refuses) != (self.ready, self.refuses):
            self.ready, self.refuses = ready, refuses
            self._log.info("readiness", ready=ready and not refuses)
            await self._on_ready()


async def _pause(told: int) -> int:
    """Let others run if enough streams were told of something in this turn of the event loop. Returns how many were."""
    if told < AT_ONCE:
        return told
    await asyncio.sleep(0)
    return 0
