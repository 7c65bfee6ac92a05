"""Tokens that are written as they come, without waking the task of their stream."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, nullcontext
from unittest import mock

import pytest

from gateway.chunk import Chunk
from gateway.detokenizer import TOKENS_AT_ONCE
from gateway.feed import Batch
from gateway.link import Link
from gateway.metrics import Metrics
from gateway.stream import Stream
from gateway.text import TextModel
from protos.errors import QueueFull
from protos.link.v1 import gateway_link_pb2 as pb
from protos.tls import Tls
from protos.v1 import types_pb2
from tests.gateway.harness import ending, ids, model_info

MOST = 20
TEXT = "the quick brown fox jumps over the lazy dog"


class Taking:
    """A feed of a link, whose client waits in `take`. `taken`: what its taker got."""

    def __init__(self, takes: Callable[[Batch], bool]) -> None:
        self.link = Link(
            ["nowhere:1"],
            Tls(),
            max_requests=1,
            max_unread_tokens=MOST,
            reconnect_timeout_s=30,
            rpc_timeout_s=1,
            on_ready=mock.AsyncMock(),
        )
        self.link.scheduler = mock.Mock(up=True)
        self.feed = self.link.follow(pb.Submit(request_id="r"))
        self.feed.taker = takes
        self.waiting = asyncio.create_task(self.link.take(self.feed))

    async def come(self, *deltas: pb.Delta) -> None:
        await asyncio.sleep(0)  # it waits now
        await self.link._receive(pb.ToGateway(deltas=deltas))


def delta(start: int, *tokens: int, end: bool = False) -> pb.Delta:
    return pb.Delta(request_id="r", start=start, tokens=tokens, ending=ending() if end else None)


async def test_what_comes_in_one_message_is_taken_at_once_and_together() -> None:
    taken: list[Batch] = []

    def take(batch: Batch) -> bool:
        taken.append(batch)
        return True

    at = Taking(take)
    await at.come(delta(0, 1, 2), delta(2, 3))
    await at.come(delta(3, 4))
    assert [(batch.start, batch.tokens) for batch in taken] == [(0, [1, 2, 3]), (3, [4])]
    assert len(taken[0].rounds) == 2
    assert not at.waiting.done()
    await at.come(delta(4, 5, end=True))
    batch = await at.waiting
    assert (batch.start, batch.tokens, batch.ending) == (4, [5], ending())
    assert len(taken) == 2


async def test_what_is_not_taken_stays_for_whom_waits() -> None:
    at = Taking(lambda batch: False)
    await at.come(delta(0, 1, 2))
    assert (await at.waiting).tokens == [1, 2]


async def test_while_nobody_waits_nothing_is_taken() -> None:
    at = Taking(mock.Mock(side_effect=AssertionError))
    at.feed.put(delta(0, 1))  # before the task has begun to wait
    assert not at.feed.hand_over()
    assert (await at.waiting).tokens == [1]
    await at.come(delta(1, 2))
    assert (await at.link.take(at.feed)).tokens == [2]


async def test_an_error_of_the_taker_is_of_its_stream_alone() -> None:
    at = Taking(mock.Mock(side_effect=KeyError("lost")))
    await at.come(delta(0, 1))
    with pytest.raises(KeyError, match="lost"):
        await at.waiting


async def test_a_full_buffer_that_was_taken_is_followed_on() -> None:
    at = Taking(lambda batch: True)
    at.link.scheduler.send.reset_mock()  # type: ignore[attr-defined]
    await at.come(delta(0, *range(MOST)))
    ((message,), _) = at.link.scheduler.send.call_args  # type: ignore[attr-defined]
    assert message.follow == pb.Follow(request_id="r", offset=MOST, most_tokens=MOST)
    at.waiting.cancel()


async def test_a_request_that_runs_on_keeps_no_taker_of_a_client_that_has_gone() -> None:
    at = Taking(mock.Mock(side_effect=AssertionError))
    at.feed.submit.on_disconnect = types_pb2.ON_DISCONNECT_DETACH
    await asyncio.sleep(0)
    at.waiting.cancel()
    at.link.leave(at.feed)
    assert at.feed.taker is None
    await at.come(delta(0, 1), delta(1, 2, end=True))


def stream_of(at: Taking) -> Stream:
    return Stream(
        at.feed,
        TextModel(model_info()),
        link=at.link,
        metrics=Metrics(),
        offset=0,
        timeout_s=60,
        stalled_s=60,
        count_stalled=mock.Mock(),
    )


@pytest.mark.parametrize("ready", [True, False])
async def test_a_stream_writes_all_but_its_end_at_once_while_its_client_reads(ready: bool) -> None:
    at = Taking(lambda batch: False)
    at.waiting.cancel()
    stream = stream_of(at)
    written: list[Chunk] = []
    yielded: list[Chunk] = []
    stream.write_at_once(lambda: ready, written.append)

    async def iterate() -> None:
        yielded.extend([chunk async for chunk in stream])

    iterating = asyncio.create_task(iterate())
    tokens = ids(TEXT)
    await at.come(delta(0, *tokens[:3]))
    await at.come(delta(3, *tokens[3:]))
    await at.come(delta(len(tokens), end=True))
    await iterating
    assert len(tokens) < min(MOST, TOKENS_AT_ONCE)
    assert "".join(chunk.text for chunk in written + yielded) == TEXT
    assert len(written) == (2 if ready else 0)
    assert stream.answer.tokens == len(tokens)
    assert yielded[-1].final is not None


@pytest.mark.parametrize("ended", [True, False])
async def test_a_deadline_takes_an_answer_that_has_ended_from_no_client_that_reads_slowly(ended: bool) -> None:
    at = Taking(lambda batch: False)
    at.waiting.cancel()
    stream = stream_of(at)
    chunks = aiter(stream)
    coming = asyncio.create_task(at.come(delta(0, 1)))
    first = await anext(chunks)
    await coming
    async with AsyncExitStack() as stack:
        stack.enter_context(nullcontext() if ended else pytest.raises(QueueFull))
        await stack.enter_async_context(stream.writing(first))
        await at.come(delta(1, 2, end=ended))
        stream._deadline = 0.0  # it passes
        stream._lose_patience()
    if ended:
        assert (await anext(chunks)).final is not None
    stream.close()
