"""Offsets: nothing twice, nothing missing, however deltas arrive."""

import pytest

from gateway.feed import JUMPS_OF_A_FOLLOW, Feed
from gateway.stream_states import Event
from protos.errors import Lost, NotServing
from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import gateway_link_pb2 as pb
from protos.v1 import types_pb2
from tests.gateway.harness import ending


def delta(start: int, *tokens: int, drafted: int = 0, accepted: int = 0, end: bool = False) -> pb.Delta:
    return pb.Delta(start=start, tokens=tokens, drafted=drafted, accepted=accepted, ending=ending() if end else None)


@pytest.fixture
def feed() -> Feed:
    return Feed(pb.Submit(request_id="r"), accepted=True)


async def test_what_a_slow_reader_missed_is_one_batch(feed: Feed) -> None:
    for start in range(0, 100, 2):
        feed.put(delta(start, start, start + 1, drafted=4, accepted=1))
    batch = await feed.take()
    assert (batch.start, batch.tokens, len(batch.rounds)) == (0, list(range(100)), 50)


async def test_tokens_seen_before_are_cut_off(feed: Feed) -> None:
    feed.put(delta(0, 1, 2, 3))
    await feed.take()
    feed.put(delta(0, 1, 2, 3))
    feed.put(delta(2, 3, 4))
    batch = await feed.take()
    assert (batch.start, batch.tokens) == (3, [4])


async def test_log_probabilities_stay_with_their_tokens(feed: Feed) -> None:
    def with_logprobs(start: int, *tokens: int) -> pb.Delta:
        logprobs = common_pb.Logprobs(tokens=[types_pb2.Logprob(logprob=-float(token)) for token in tokens])
        return pb.Delta(start=start, tokens=tokens, logprobs=logprobs)

    feed.put(with_logprobs(0, 1, 2, 3))
    feed.put(with_logprobs(2, 3, 4))
    batch = await feed.take()
    batch.skip(1)
    assert batch.tokens == [2, 3, 4]
    assert [own.logprob for own in batch.logprobs] == [-2.0, -3.0, -4.0]


async def test_a_gap_asks_for_a_follow_and_the_replay_fills_it(feed: Feed) -> None:
    assert not feed.put(delta(0, 1))
    (message,) = feed.put(delta(2, 3))
    assert message.follow.offset == 1
    assert not feed.put(delta(3, 4))  # was on its way behind the gap already
    for each in (delta(1, 2), delta(2, 3), delta(3, 4)):
        assert not feed.put(each)
    assert (await feed.take()).tokens == [1, 2, 3, 4]


async def test_a_replay_that_leaves_the_gap_is_data_loss(feed: Feed) -> None:
    feed.put(delta(5, 6))
    feed.put(delta(5, 6))
    with pytest.raises(Lost, match="0 to 5"):
        await feed.take()


async def test_what_came_before_an_error_is_delivered_first(feed: Feed) -> None:
    feed.put(delta(0, 1))
    feed.on(Event.GIVE_UP, NotServing("gone"))
    assert (await feed.take()).tokens == [1]
    with pytest.raises(NotServing):
        await feed.take()


async def test_an_ending_without_tokens_is_a_batch(feed: Feed) -> None:
    feed.put(delta(0, end=True))
    assert (await feed.take()).ending == ending()


async def test_the_answer_to_another_streams_follow_is_no_loss(feed: Feed) -> None:
    """Two slow clients of one request catch up at a time, and new tokens come meanwhile. (Was DATA_LOSS.)"""
    feed.on(Event.LINK)
    feed.stray_jumps += JUMPS_OF_A_FOLLOW  # the other stream follows from token 10
    feed.put(delta(90, 91))  # a new token; both answers are still to come
    feed.put(delta(10, 11, 12))  # the other's answer
    feed.put(delta(91, 92))  # a new token again
    for start in range(10):
        feed.put(delta(start, start))
    assert (await feed.take()).tokens == list(range(10))


def test_a_submission_that_is_sent_again_carries_the_time_that_is_left_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((100.0, 100.0, 102.0))
    monkeypatch.setattr("gateway.feed.time.monotonic", lambda: next(now))
    feed = Feed(pb.Submit(request_id="r", timeout_s=5.0))
    sent = [message.submit.timeout_s for _ in range(2) for message in feed.on(Event.LINK)]
    assert sent == [5.0, 3.0]
