"""Whatever scheduler, network and clients do, in whatever order: nothing is lost, repeated or reordered, and all ends.

Hypothesis draws the steps. The gateway's Link is the real one; scheduler, connection and clients are models.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.feed import Feed
from gateway.link import Link
from protos.errors import DuplicateRequest, Lost, NotServing, QueueFull, RequestError, UnknownRequest
from protos.idempotence import content
from protos.link.v1 import gateway_link_pb2 as pb
from protos.tls import Tls
from protos.v1 import types_pb2
from tests.gateway.harness import ending

T = TypeVar("T")
MOST_UNREAD = 8  # tokens
IDS = st.sampled_from(["a", "b"])
CANCEL, DETACH = types_pb2.ON_DISCONNECT_CANCEL, types_pb2.ON_DISCONNECT_DETACH


@dataclass
class Request:
    """One that the scheduler knows. Its output token number n is n."""

    submit: pb.Submit
    stored: bool = False
    rounds: list[int] = field(default_factory=list)  # tokens of each
    ended: bool = False
    followed: bool = False  # by this gateway


class Scheduler:
    """As the scheduler answers: in order, one message after the other."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.cancelled: set[str] = set()
        self.unheard: list[pb.FromGateway] = []
        self.unsaid: list[pb.ToGateway] = []
        self.mood: RequestError | None = None  # what new submissions are refused with

    def hear(self) -> None:
        message = self.unheard.pop(0)
        match message.WhichOneof("kind"):
            case "submit":
                self._submitted(message.submit)
            case "follow":
                self._followed(message.follow)
            case "follows":
                for follow in message.follows.follow:
                    self._followed(follow)
            case "cancel":
                self.cancelled.add(message.cancel.request_id)
                if (known := self.requests.get(message.cancel.request_id)) and known.stored:
                    self.end(known)

    def _submitted(self, submit: pb.Submit) -> None:
        known = self.requests.get(submit.request_id)
        if known is None and self.mood is not None:
            self._refuse(submit.request_id, self.mood)
        elif known is None:
            self.requests[submit.request_id] = Request(submit, followed=True)
        elif content(known.submit) != content(submit):
            known.followed = False
            self._refuse(submit.request_id, DuplicateRequest("taken"))
        else:
            if known.stored:
                self.unsaid.append(pb.ToGateway(accepted=[submit.request_id]))
            self._followed(pb.Follow(request_id=submit.request_id))

    def _refuse(self, id: str, error: RequestError) -> None:
        refusal = pb.Refusal(request_id=id, code=error.code.value[0], retry_after_s=error.retry_after_ms / 1000)
        self.unsaid.append(pb.ToGateway(refusals=[refusal]))

    def _followed(self, follow: pb.Follow) -> None:
        if (known := self.requests.get(follow.request_id)) is None:
            self._refuse(follow.request_id, UnknownRequest("unknown"))
            return
        start = 0
        for tokens in known.rounds:
            if follow.most_tokens and start >= follow.offset + follow.most_tokens:
                return
            if start + tokens > follow.offset:
                self._say(known, start, tokens)
            start += tokens
        known.followed = True
        if known.ended:
            self._say(known, start, 0)

    def _say(self, known: Request, start: int, tokens: int) -> None:
        id, end = known.submit.request_id, None if tokens else ending()
        delta = pb.Delta(request_id=id, start=start, tokens=range(start, start + tokens), ending=end)
        self.unsaid.append(pb.ToGateway(deltas=[delta]))

    def store(self, known: Request) -> None:
        if not known.stored:
            known.stored = True
            if known.followed:
                self.unsaid.append(pb.ToGateway(accepted=[known.submit.request_id]))

    def run(self, known: Request, tokens: int) -> None:
        if known.stored and not known.ended:
            known.rounds.append(tokens)
            if known.followed:
                self._say(known, sum(known.rounds) - tokens, tokens)

    def end(self, known: Request) -> None:
        if known.stored and not known.ended:
            known.ended = True
            if known.followed:
                self._say(known, sum(known.rounds), 0)

    def hang_up(self) -> None:
        self.unheard.clear()
        self.unsaid.clear()
        for known in self.requests.values():
            known.followed = False

    def restart(self) -> None:
        self.hang_up()
        self.requests = {id: known for id, known in self.requests.items() if known.stored}


@dataclass
class Client:
    feed: Feed
    tokens: int = 0
    ended: int = 0
    error: BaseException | None = None
    gone: bool = False
    taking: "asyncio.Task[Any] | None" = None

    @property
    def done(self) -> bool:
        return self.gone or bool(self.ended) or self.error is not None


class Streams(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.loop = asyncio.new_event_loop()
        self.loop.time = lambda: self.now  # type: ignore[method-assign]
        self.scheduler = Scheduler()
        self.clients: list[Client] = []
        self.owed: dict[str, bytes] = {}  # requests whose clients hung up, and wanted them cancelled then: content
        self.asked: set[str] = set()  # requests that somebody cancelled
        self.damaged: set[str] = set()  # requests of which deltas were dropped, or all was forgotten
        self.up = False
        self.sent = 0
        self.link = Link(
            ["nowhere:1"],
            Tls(),
            max_requests=100,
            max_unread_tokens=MOST_UNREAD,
            reconnect_timeout_s=30,
            rpc_timeout_s=1,
            on_ready=mock.AsyncMock(),
        )
        self.link._log = mock.Mock()
        self.link.scheduler = self  # type: ignore[assignment]  # `up` and `send`
        self.connect()

    def send(self, message: pb.FromGateway) -> None:
        if self.up:
            self.sent += 1
            self.scheduler.unheard.append(message)

    def do(self, what: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(what)

    async def call(self, act: Callable[..., T], *arguments: Any) -> T:
        """Where the event loop runs."""
        return act(*arguments)

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    def bounded(self, act: Callable[[], object], messages: int = 2) -> None:
        """So many messages for each live stream, at most."""
        before, streams = self.sent, sum(map(len, self.link.feeds.values())) + 1
        act()
        assert self.sent - before <= messages * streams

    # ---- clients ----

    def submission(self, id: str, detached: bool, prompt: int) -> pb.Submit:
        return pb.Submit(request_id=id, prompt=[prompt], on_disconnect=DETACH if detached else CANCEL)

    @rule(id=IDS, prompt=st.sampled_from([1, 1, 1, 2]))
    def submit(self, id: str, prompt: int) -> None:
        try:
            feed = self.do(self.call(self.link.submit, self.submission(id, id == "b", prompt)))
        except (DuplicateRequest, NotServing):
            return
        self.clients.append(Client(feed))

    @rule(id=IDS)
    def resume(self, id: str) -> None:
        known = self.scheduler.requests.get(id)
        if known is not None and known.stored and self.up:
            self.clients.append(Client(self.do(self.call(self.link.follow, known.submit))))

    @rule(data=st.data())
    @precondition(lambda self: any(not client.done for client in self.clients))
    def read(self, data: st.DataObject) -> None:
        self._read(data.draw(st.sampled_from([client for client in self.clients if not client.done])))

    def _read(self, client: Client) -> None:
        if client.taking is None:
            client.taking = self.loop.create_task(self._take(client.feed))
        self.do(self.settle())
        if not client.taking.done():
            return
        taking, client.taking = client.taking, None
        client.error = taking.exception()
        if client.error is not None:
            assert isinstance(client.error, RequestError)
            assert not isinstance(client.error, Lost) or client.feed.request_id in self.damaged
            self.link.leave(client.feed)
            return
        batch = taking.result()
        assert batch.tokens == list(range(client.tokens, client.tokens + len(batch.tokens)))
        assert len(batch.tokens) <= MOST_UNREAD + 2
        client.tokens += len(batch.tokens)
        if batch.ending is not None:
            client.ended += 1
            self.link.leave(client.feed)

    async def _take(self, feed: Feed) -> Any:
        await feed.until_accepted()
        return await self.link.take(feed)

    @rule()
    def everybody_reads(self) -> None:
        for client in self.clients:
            if not client.done:
                self._read(client)

    @rule(data=st.data())
    @precondition(lambda self: any(not client.done for client in self.clients))
    def hang_up(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from([client for client in self.clients if not client.done]))
        id, live = client.feed.request_id, client.feed.life.live
        client.gone = True
        if client.taking is not None:
            client.taking.cancel()
            self.do(self.settle())
        readers = [feed for feed in self.link.feeds.get(id, []) if feed.life.read]
        if live and readers == [client.feed] and client.feed.submit.on_disconnect == CANCEL:
            self.owed[id] = content(client.feed.submit)
        self.bounded(lambda: self.link.leave(client.feed))

    @rule(id=IDS)
    def cancel(self, id: str) -> None:
        if live := self.link.feeds.get(id):
            self.owed[id] = content(live[0].submit)
        try:
            self.bounded(lambda: self.link.cancel(id))
        except NotServing:
            return
        self.asked.add(id)

    # ---- scheduler ----

    @rule()
    @precondition(lambda self: self.scheduler.unheard)
    def hear(self) -> None:
        self.scheduler.hear()

    @rule(count=st.integers(1, 20))
    @precondition(lambda self: self.scheduler.unsaid)
    def say(self, count: int) -> None:
        message = pb.ToGateway()  # with nothing in it, it is a heartbeat
        for one in self.scheduler.unsaid[:count]:
            message.MergeFrom(one)
        del self.scheduler.unsaid[:count]
        self.bounded(lambda: self.do(self.link._receive(message)), messages=count)

    @rule(id=IDS)
    def store(self, id: str) -> None:
        if id in self.scheduler.requests:
            self.scheduler.store(self.scheduler.requests[id])

    @rule(id=IDS, tokens=st.integers(1, 3), rounds=st.integers(1, 12))
    def run(self, id: str, tokens: int, rounds: int) -> None:
        for _ in range(rounds):
            if id in self.scheduler.requests:
                self.scheduler.run(self.scheduler.requests[id], tokens)

    @rule()
    def all_goes_well(self) -> None:
        """Everybody is heard."""
        for known in self.scheduler.requests.values():
            self.scheduler.store(known)
        while self.scheduler.unheard or self.scheduler.unsaid:
            while self.scheduler.unheard:
                self.scheduler.hear()
            for known in self.scheduler.requests.values():
                self.scheduler.store(known)
            self.say(20)

    @rule(id=IDS)
    def end(self, id: str) -> None:
        if id in self.scheduler.requests:
            self.scheduler.end(self.scheduler.requests[id])

    @rule(mood=st.sampled_from([None, None, NotServing("later", retry_after_ms=500), QueueFull("full")]))
    def change_mood(self, mood: RequestError | None) -> None:
        self.scheduler.mood = mood

    @rule(id=IDS)
    def another_gateway_takes_the_id(self, id: str) -> None:
        self.scheduler.requests.setdefault(id, Request(self.submission(id, id == "b", 3), stored=True))

    # ---- the connection, and what goes wrong ----

    def connect(self) -> None:
        self.up, self.faulty = True, False
        self.bounded(lambda: self.do(self.link._linked()))

    def drop(self) -> None:
        if self.up:
            self.up = False
            self.scheduler.hang_up()
            self.do(self.link._unlinked())

    @rule()
    def connect_again(self) -> None:
        self.drop()
        self.connect()

    @rule()
    def break_off(self) -> None:
        self.drop()

    @rule()
    def restart(self) -> None:
        self.drop()
        self.scheduler.restart()

    @rule(id=IDS, rounds=st.integers(0, 5))
    def restart_with_lost_writes(self, id: str, rounds: int) -> None:
        self.restart()
        if (known := self.scheduler.requests.get(id)) is not None:
            known.rounds, known.ended = known.rounds[: len(known.rounds) - rounds], False

    @rule(id=IDS)
    def restart_and_forget(self, id: str) -> None:
        self.restart()
        if self.scheduler.requests.pop(id, None) is not None:
            self.damaged.add(id)

    @rule(data=st.data(), twice=st.booleans())
    @precondition(lambda self: any(message.deltas for message in self.scheduler.unsaid))
    def lose_or_repeat_a_delta(self, data: st.DataObject, twice: bool) -> None:
        unsaid = self.scheduler.unsaid
        at = data.draw(st.sampled_from([at for at, message in enumerate(unsaid) if message.deltas]))
        self.damaged.add(unsaid[at].deltas[0].request_id)
        self.faulty = True
        unsaid[at : at + 1] = [unsaid[at]] * 2 * twice

    @rule(seconds=st.sampled_from([0.2, 5, 31]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.bounded(lambda: self.do(self.settle()))

    @rule()
    def the_gateway_drains(self) -> None:
        self.bounded(lambda: self.do(self.link.give_up(NotServing("stopped"))))

    # ---- what holds ----

    @invariant()
    def only_live_streams_are_kept(self) -> None:
        for feeds in self.link.feeds.values():
            assert feeds
            assert all(feed.life.live for feed in feeds)

    @invariant()
    def nobody_cancels_what_is_to_run_on(self) -> None:
        assert self.scheduler.cancelled <= self.owed.keys() | self.asked

    def teardown(self) -> None:
        """All is well again: whoever reads has its end or an error, and nothing is kept."""
        try:
            self.scheduler.mood = None
            if self.faulty or not self.up:  # a link that lost something is broken, sooner or later
                self.drop()
                self.connect()
            for over in (False, True):
                for _ in range(40):
                    self.now += 1
                    self.do(self.settle())
                    self.all_goes_well()
                    for client in self.clients:
                        if not client.done:
                            self._read(client)
                if not over:
                    self.cancelled_or_over()
                    for known in self.scheduler.requests.values():
                        self.scheduler.end(known)
            assert all(client.done for client in self.clients)
            assert all(client.ended <= 1 for client in self.clients)
            assert not self.link.feeds
        finally:
            for client in self.clients:
                if client.taking is not None:
                    client.taking.cancel()
            self.do(self.settle())
            self.loop.close()

    def cancelled_or_over(self) -> None:
        for id, owed in self.owed.items():
            known = self.scheduler.requests.get(id)
            if known is not None and content(known.submit) == owed:
                assert known.ended or id in self.scheduler.cancelled


TestStreams = Streams.TestCase
TestStreams.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
