"""Whatever scheduler, network and clients do, in whatever order: nothing is lost, repeated or reordered, and all ends.

Hypothesis draws the steps. The gateway's Link is the real one; scheduler, connection and clients are models.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.feed import Feed
from gateway.link import Link
from gateway.unanswered import Unanswered
from protos.errors import DuplicateRequest, Lost, NotServing, QueueFull, RequestError
from protos.idempotence import content
from protos.link.v1 import gateway_link_pb2 as pb
from protos.tls import Tls
from tests.gateway.stream_model import CANCEL, Client, Request, Scheduler, called, settle, submission

T = TypeVar("T")
MOST_UNREAD = 8  # tokens
IDS = st.sampled_from(["a", "b"])


class Streams(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.loop = asyncio.new_event_loop()
        self.loop.time = lambda: self.now  # type: ignore[method-assign]
        self.scheduler = Scheduler()
        self.clients: list[Client] = []
        self.owed: dict[str, bytes | None] = {}  # requests whose clients wanted them cancelled: content; None: over
        self.asked: set[str] = set()  # requests that somebody cancelled
        self.damaged: set[str] = set()  # requests of which deltas were dropped, or all was forgotten
        self.up = False
        self.unanswered = Unanswered()
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
        self.link.scheduler = self  # type: ignore[assignment]  # `up`, `send` and `unanswered`
        self.connect()

    def send(self, message: pb.FromGateway) -> None:
        if self.up and self.unanswered.sends(message):
            self.sent += 1
            self.scheduler.unheard.append(message)

    def do(self, what: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(what)

    def bounded(self, act: Callable[[], object], messages: int = 2) -> None:
        """So many messages for each live stream, at most."""
        before, streams = self.sent, sum(map(len, self.link.feeds.values())) + 1
        act()
        assert self.sent - before <= messages * streams

    # ---- clients ----

    @rule(id=IDS, prompt=st.sampled_from([1, 1, 1, 2]))
    def submit(self, id: str, prompt: int) -> None:
        fresh = id not in self.link.feeds
        try:
            feed = self.do(called(self.link.submit, submission(id, id == "b", prompt)))
        except (DuplicateRequest, NotServing):
            return
        if fresh and id in self.owed:  # what was to end is over, or was refused: this one is to run
            self.owed[id] = None
        self.clients.append(Client(feed))

    @rule(id=IDS)
    def resume(self, id: str) -> None:
        known = self.scheduler.requests.get(id)
        if known is not None and known.stored and self.up:
            self.clients.append(Client(self.do(called(self.link.follow, known.submit))))

    @rule(data=st.data())
    @precondition(lambda self: any(not client.done for client in self.clients))
    def read(self, data: st.DataObject) -> None:
        self._read(data.draw(st.sampled_from([client for client in self.clients if not client.done])))

    def _read(self, client: Client) -> None:
        if client.taking is None:
            client.taking = self.loop.create_task(self._take(client.feed))
        self.do(settle())
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
            self.do(settle())
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
        if id not in self.scheduler.requests:
            self.scheduler.requests[id] = Request(submission(id, id == "b", 3), stored=True)
            if id in self.owed:  # it was to end, and has been forgotten: this one is to run
                self.owed[id] = None

    # ---- the connection, and what goes wrong ----

    def connect(self) -> None:
        self.up, self.faulty = True, False
        self.unanswered.clear()
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
        self.bounded(lambda: self.do(settle()))

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
                    self.do(settle())
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
            self.do(settle())
            self.loop.close()

    def cancelled_or_over(self) -> None:
        for id, owed in self.owed.items():
            known = self.scheduler.requests.get(id)
            if known is not None and content(known.submit) == owed:
                assert known.ended or id in self.scheduler.cancelled


def test_streams_of_a_request_that_cannot_be_looked_up_yet_ask_again_once_each() -> None:
    """Each of them hears the refusals of all."""
    streams = Streams()
    for _ in range(4):
        streams.submit("a", 1)
    streams.all_goes_well()
    streams.drop()
    streams.end("a")
    streams.change_mood(NotServing("later", retry_after_ms=500))
    streams.connect()
    for _ in range(4):
        streams.all_goes_well()
        streams.wait(5)
    streams.teardown()


TestStreams = Streams.TestCase
TestStreams.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
