"""What a leader keeps of requests that ended, as long as the store might have lost them; and how it tells of them."""

import asyncio
import math
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from protos.channels import LINK_MESSAGE_BYTES
from protos.errors import DuplicateRequest
from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import gateway_link_pb2 as pb
from protos.v1 import types_pb2 as types_pb
from scheduler_service.clock import SteadyClock
from scheduler_service.config import Settings
from scheduler_service.core.lifecycle import State
from scheduler_service.leader import Leader
from scheduler_service.ledger import AT_ONCE, ENDED_KEPT_S, TOLD_AT_ONCE, Ledger
from scheduler_service.outbox import MAX_PENDING, GatewayOutbox
from scheduler_service.pace import REPEATED, UNITS, Lane, Turns, of_command
from scheduler_service.persister import MAX_WRITES_PER_COMMIT
from scheduler_service.round_log import MARK_EVERY
from scheduler_service.store import MemoryStore, Verdict, Write
from scheduler_service.store.rounds import LoggedRound, decode, encode
from scheduler_service.tracked import Tracked
from tests.scheduler.store.writes import record
from tests.waiting import WAIT_S

LONG = UNITS * AT_ONCE  # rounds: they are repeated in several turns of the event loop


class Book(Ledger):
    """With requests that end now, and time that passes when it is told to."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(), lambda id: None)

    def wait(self, seconds: float) -> None:
        assert not self.orphans(seconds, timeout_s=math.inf)

    async def end(self, id: str) -> None:
        await end(self, id)

    @property
    def kept(self) -> list[str]:
        return [write.record.request.id for write in self.everything()]


async def end(ledger: Ledger, id: str) -> None:
    ended = record(id, state=State.FINISHED)
    ledger.live[id] = Tracked(pb.Submit(request_id=id), ended, stored=True)
    await ledger.durable([(Write(ended, ending=b""), Verdict.APPLIED)])


async def test_a_commit_is_told_before_as_many_rows_are_reported_again() -> None:
    """Else ever more would wait for the store where workers fill every turn: half of the time is that of the store."""
    turns, reported, told = Turns(UNITS), 0, GatewayOutbox()
    ledger = Ledger(MemoryStore(), lambda id: None, turns)
    round, writes = LoggedRound(0, (1,), 0, 0), []
    for number in range(MAX_WRITES_PER_COMMIT):
        written = Write(record(f"{number}"), start=0, log=encode(round.tokens, 0, 0), brief=True)
        ledger.live[f"{number}"] = Tracked(pb.Submit(request_id=f"{number}"), written.record, stored=True)
        ledger.live[f"{number}"].rounds.append((round, written.log))
        ledger.join(f"{number}", told)
        writes.append((written, Verdict.APPLIED))

    async def worker() -> None:
        nonlocal reported
        while True:
            await turns.room(32, Lane.REPORTS)
            reported += 32
            await turns.room(of_command(40), Lane.COMMANDS)

    workers = [asyncio.create_task(worker()) for _ in range(16)]
    await asyncio.sleep(0)
    await ledger.durable(writes)
    for task in workers:
        task.cancel()
    assert len(told.take().deltas) == MAX_WRITES_PER_COMMIT
    assert 0 < reported <= MAX_WRITES_PER_COMMIT / 2


async def test_a_request_that_ended_long_ago_takes_no_memory() -> None:
    book = Book()
    await book.end("a")
    book.wait(ENDED_KEPT_S - 1)
    await book.end("b")
    assert book.kept == ["a", "b"]
    book.wait(2)
    await book.durable([])
    assert book.kept == ["b"]


async def test_a_clock_that_is_set_back_has_nothing_kept_for_longer() -> None:
    clock = iter(range(10_000, 0, -1_000))
    leader = Leader(Settings(_cli_parse_args=False), MemoryStore(), clock=lambda: float(next(clock)))  # type: ignore[call-arg]
    await end(leader.ledger, "a")
    leader.ledger.orphans(ENDED_KEPT_S + 1, timeout_s=math.inf)
    await leader.ledger.durable([])
    assert not list(leader.ledger.everything())


def test_a_leaders_clock_follows_one_that_is_set_by_a_tenth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not jump, which would end all requests at once; nor does it stay wrong, by which the next one judges."""
    wall, passed = 1000.0, 50.0
    monkeypatch.setattr("time.time", lambda: wall)
    monkeypatch.setattr("time.monotonic", lambda: passed)
    clock = SteadyClock()
    wall, passed = 1010.0, 60.0
    assert clock() == 1010
    wall += 7200
    for second in range(1, 73_000):
        wall, passed = wall + 1, passed + 1
        assert 0.9 * second <= clock() - 1010 <= 1.1 * second
    assert clock() == pytest.approx(wall)


async def test_what_ended_before_the_store_went_away_is_kept_however_long_it_stays_away() -> None:
    book = Book()
    await book.end("a")
    book.wait(100 * ENDED_KEPT_S)
    assert book.kept == ["a"]


async def test_what_ended_is_kept_while_the_same_request_that_is_sent_again_is_not_stored_yet() -> None:
    """Else a store that has lost the end would let the request run twice."""
    book = Book()
    await book.end("a")
    book.live["a"] = Tracked(pb.Submit(request_id="a"), record("a"))
    (kept,) = book.everything()
    assert kept.ending is not None


async def test_what_has_just_ended_is_known_though_the_store_has_lost_it() -> None:
    book = Book()
    await book.end("a")
    assert (await book.submission("a")).request_id == "a"
    stored = await book.stored("a")
    assert stored is not None
    assert stored.record.state is State.FINISHED


async def test_while_much_is_told_commands_get_their_turns() -> None:
    book = Book()
    ended = [record(f"r{i}", state=State.FINISHED) for i in range(4 * TOLD_AT_ONCE)]
    book.live = {one.request.id: Tracked(pb.Submit(request_id=one.request.id), one, stored=True) for one in ended}
    telling = asyncio.create_task(book.durable([(Write(one, ending=b""), Verdict.APPLIED) for one in ended]))
    turns = []
    while not telling.done():
        await asyncio.sleep(0)
        turns.append(len(book.live))
    assert len(set(turns)) >= 4
    assert not book.live


async def grow(book: Book, id: str, rounds: int) -> None:
    """A live request with so many durable rounds of two tokens."""
    book.live[id] = tracked = Tracked(pb.Submit(request_id=id), record(id), stored=True)
    for start in range(0, 2 * rounds, 2):
        await book.durable([advance(tracked, start)])


def advance(tracked: Tracked, start: int) -> tuple[Write, Verdict]:
    log = encode([start, start + 1], 4, 1)
    tracked.rounds.append((LoggedRound(start, (start, start + 1), 4, 1), log))
    written = replace(tracked.record, emitted=start + 2)
    return Write(written, start=start, log=log), Verdict.APPLIED


async def test_a_message_holds_fewer_rounds_the_more_they_tell_of_prompts() -> None:
    """By number alone the first one would hold all of them, 80 MB."""
    outbox, told = GatewayOutbox(), common_pb.Logprobs(embedding=[1.0] * 100_000).SerializeToString()
    for number in range(200):
        outbox.round(f"r{number}", LoggedRound(0, (1,), 0, 0, told))
    sizes, rounds = [], 0
    while rounds < 200:
        message = outbox.take()
        sizes.append(message.ByteSize())
        rounds += len(message.deltas)
    assert max(sizes) < LINK_MESSAGE_BYTES / 2


async def test_rounds_that_a_gateway_asked_for_again_cut_it_off_no_sooner() -> None:
    book, outbox = Book(), GatewayOutbox()
    await grow(book, "a", rounds=1)
    for number in range(MAX_PENDING):
        outbox.accepted(f"r{number}")
    cut_off = asyncio.create_task(outbox.overflow())
    await book.follow("a", 0, outbox)
    await asyncio.sleep(0)
    assert not cut_off.done()
    outbox.accepted("one more")
    await asyncio.wait_for(cut_off, WAIT_S)


async def heard(outbox: GatewayOutbox) -> list[int]:
    return [token for delta in outbox.take().deltas for token in delta.tokens]


async def test_a_follow_sends_what_is_durable_from_its_offset_on_and_then_what_comes() -> None:
    book, outbox = Book(), GatewayOutbox()
    await grow(book, "a", rounds=100)
    await book.follow("a", 197, outbox)
    await book.durable([advance(book.live["a"], 200)])
    assert await heard(outbox) == [196, 197, 198, 199, 200, 201]


async def test_to_follow_from_the_end_few_rounds_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that links again follows a thousand requests at once, of hundreds of rounds each."""
    book = Book()
    await grow(book, "a", rounds=1000)
    decoded = 0

    def counted(*args: Any) -> Iterator[LoggedRound]:
        nonlocal decoded
        for one in decode(*args):
            decoded += 1
            yield one

    monkeypatch.setattr("scheduler_service.round_log.decode", counted)
    await book.follow("a", 2000, GatewayOutbox())
    assert decoded <= MARK_EVERY


async def test_while_many_gateways_follow_at_once_others_get_their_turns() -> None:
    """A new leader hears from all of them in the same turn of the event loop."""
    book, outboxes = Book(), [GatewayOutbox() for _ in range(16)]
    for number in range(32):
        await grow(book, f"r{number}", rounds=AT_ONCE)
    telling = asyncio.gather(*(follow_all(book, outbox) for outbox in outboxes))
    followed, told = [0], []
    while not telling.done():
        await asyncio.sleep(0)
        followed.append(sum(len(outbox.follows) for outbox in outboxes))
        told.append(sum(len(outbox.take().deltas) for outbox in outboxes))
    assert max(after - before for before, after in pairwise(followed)) <= UNITS
    assert max(told) <= UNITS * AT_ONCE / REPEATED
    assert sum(told) == 16 * 32 * AT_ONCE


async def follow_all(book: Book, outbox: GatewayOutbox) -> None:
    for id in list(book.live):
        await book.follow(id, 0, outbox)


async def test_new_rounds_wait_until_the_answer_to_another_stream_of_that_gateway_is_whole() -> None:
    """In between they would look as if the answer had left rounds out, and a stream would be told so."""
    book, outbox = Book(), GatewayOutbox()
    await grow(book, "a", rounds=LONG)
    book.join("a", outbox)
    following = asyncio.create_task(book.follow("a", 0, outbox, most=2 * LONG - 2))
    for number in range(LONG, LONG + 5):
        await asyncio.sleep(0)
        await book.durable([advance(book.live["a"], 2 * number)])
    assert not following.done()
    await following
    assert await heard(outbox) == [*range(2 * LONG - 2), *range(2 * LONG, 2 * LONG + 10)]
    await book.durable([advance(book.live["a"], 2 * LONG + 10)])
    assert await heard(outbox) == [2 * LONG + 10, 2 * LONG + 11]


async def test_of_two_answers_at_once_the_shorter_keeps_no_new_rounds_from_the_gateway() -> None:
    """After a change of leaders a gateway with two streams of a request is answered while it follows again."""
    book, outbox = Book(), GatewayOutbox()
    await grow(book, "a", rounds=LONG)
    part = asyncio.create_task(book.follow("a", 0, outbox, most=2 * LONG - 2))
    await asyncio.sleep(0)
    await book.follow("a", 2 * LONG, outbox)
    assert not part.done()
    await part
    outbox.take()
    await book.durable([advance(book.live["a"], 2 * LONG)])
    assert await heard(outbox) == [2 * LONG, 2 * LONG + 1]


async def test_the_end_that_comes_during_an_answer_to_another_stream_is_told_after_it() -> None:
    book, outbox = Book(), GatewayOutbox()
    await grow(book, "a", rounds=LONG)
    book.join("a", outbox)
    following = asyncio.create_task(book.follow("a", 0, outbox, most=2 * LONG - 2))
    await asyncio.sleep(0)
    ended = replace(book.live["a"].record, state=State.FINISHED)
    await book.durable([(Write(ended, ending=b""), Verdict.APPLIED)])
    await following
    *deltas, last = outbox.take().deltas
    assert (last.start, last.HasField("ending")) == (2 * LONG, True)
    assert not any(delta.HasField("ending") for delta in deltas)


async def test_a_gateway_that_was_refused_an_id_of_others_leaves_the_request_as_it_goes() -> None:
    book, outbox = Book(), GatewayOutbox()
    await grow(book, "a", rounds=1)
    book.join("a", outbox)
    outbox.refuse("a", DuplicateRequest("request_id: a was used before"))
    book.leave(outbox)
    assert not book.live["a"].followers


async def test_what_becomes_durable_while_a_long_output_is_repeated_is_not_missing() -> None:
    book, outbox = Book(), GatewayOutbox()
    await grow(book, "a", rounds=LONG)
    following = asyncio.create_task(book.follow("a", 0, outbox))
    await asyncio.sleep(0)
    await book.durable([advance(book.live["a"], 2 * LONG)])
    assert not following.done()
    await following
    assert await heard(outbox) == list(range(2 * LONG + 2))


async def test_a_request_that_ends_while_its_output_is_repeated_is_told_to_its_end() -> None:
    book, outbox = Book(), GatewayOutbox()
    await grow(book, "a", rounds=LONG)
    following = asyncio.create_task(book.follow("a", 0, outbox))
    await asyncio.sleep(0)
    await book.durable([(Write(book.live["a"].record, ending=b""), Verdict.APPLIED)])
    await following
    assert outbox.take().deltas[-1].HasField("ending")
    assert not outbox.follows


async def test_a_gateway_that_is_lost_while_output_is_repeated_to_it_follows_no_longer() -> None:
    """Else its request would never be an orphan, and its messages would pile up."""
    book, outbox = Book(), GatewayOutbox()
    await grow(book, "a", rounds=LONG)
    book.follow_later("a", 0, outbox)
    telling = asyncio.create_task(book.was_read("a", None))
    await asyncio.sleep(0)
    book.leave(outbox)
    await telling
    assert not book.live["a"].followers


async def test_of_gateways_that_come_and_go_while_the_store_hangs_none_is_kept_that_has_gone() -> None:
    book, gone = Book(), [GatewayOutbox() for _ in range(3)]
    for outbox in gone:
        book.follow_later("a", 0, outbox)
        book.leave(outbox)
    book.follow_later("a", 0, there := GatewayOutbox())
    left = [weakref.ref(outbox) for outbox in gone]
    del gone, outbox
    assert not any(one() for one in left)
    await book.was_read("a", None)
    assert there.take().refusals


async def test_a_request_that_no_gateway_wants_is_named_once_after_a_while() -> None:
    book, lost, other = Book(), GatewayOutbox(), GatewayOutbox()
    for id in ("orphan", "followed", "detached"):
        await grow(book, id, rounds=1)
        book.join(id, lost)
    book.live["detached"].submit.on_disconnect = types_pb.ON_DISCONNECT_DETACH
    book.leave(lost)
    await book.follow("followed", 2, other)
    assert book.orphans(4, timeout_s=5) == []
    assert book.orphans(1, timeout_s=5) == ["orphan"]
    assert book.orphans(1, timeout_s=5) == []


async def test_a_gateway_that_is_behind_still_wants_its_request() -> None:
    """Its client reads slowly: it follows again when it has room."""
    book, outbox = Book(), GatewayOutbox()
    await grow(book, "a", rounds=10)
    await book.follow("a", 0, outbox, most=4)
    assert book.orphans(100, timeout_s=5) == []
    await book.durable([advance(book.live["a"], 20)])
    assert await heard(outbox) == [0, 1, 2, 3]
    book.leave(outbox)
    assert book.orphans(6, timeout_s=5) == ["a"]


async def test_ends_are_kept_by_their_age_however_many_they_are() -> None:
    book = Book()
    for number in range(5000):
        await book.end(f"r{number}")
    assert len(book.kept) == 5000
