"""Clients that read slowly or not at all: what they cost, what others feel, and that they miss nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from gateway.app import Gateway
from gateway.feed import BEYOND, Feed
from gateway.stream_states import Event, Flow, Life
from laps_sd.client import AsyncClient
from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import gateway_link_pb2 as pb
from protos.v1 import inference_pb2, inference_pb2_grpc
from tests.gateway.harness import WAIT_S, Link, Scheduler, ending, gateway, ids, model_info, stack
from tests.waiting import until

UNREAD = 50
ROUND = 5
TOKEN = ids("the")[0]


def deltas(submit: pb.Submit, start: int, end: int) -> list[pb.Delta]:
    rounds = range(start, end, ROUND)
    return [pb.Delta(request_id=submit.request_id, start=at, tokens=[TOKEN] * min(ROUND, end - at)) for at in rounds]


def feed(most: int = UNREAD) -> tuple[Feed, pb.Submit]:
    submit = pb.Submit(request_id="r")
    return Feed(submit, accepted=True, most=most), submit


async def test_a_feed_keeps_so_many_tokens_and_is_followed_for_the_others() -> None:
    slow, submit = feed()
    for delta in deltas(submit, 0, 500):
        assert not slow.put(delta)
    assert slow.flow is Flow.BEHIND
    assert len((await slow.take()).tokens) == slow.received == UNREAD
    (message,) = slow.want()
    assert message.follow == pb.Follow(request_id="r", offset=UNREAD, most_tokens=UNREAD)
    for delta in deltas(submit, 500, 520):  # was on its way already
        assert not slow.put(delta)
    for delta in deltas(submit, UNREAD, UNREAD + 20):
        assert not slow.put(delta)
    batch = await slow.take()
    assert (batch.start, len(batch.tokens)) == (UNREAD, 20)


async def test_a_feed_that_is_behind_does_not_end_before_all_was_taken() -> None:
    slow, submit = feed()
    for delta in [*deltas(submit, 0, 90), pb.Delta(request_id="r", start=90, ending=ending())]:
        slow.put(delta)
    assert slow.life is Life.ACCEPTED
    await slow.take()
    assert slow.want()
    for delta in [*deltas(submit, UNREAD, 90), pb.Delta(request_id="r", start=90, ending=ending())]:
        slow.put(delta)
    assert (await slow.take()).ending is not None
    assert slow.life is Life.ENDED


def test_a_feed_that_was_left_keeps_nothing_and_sees_the_end() -> None:
    slow, submit = feed()
    for delta in deltas(submit, 0, 100):
        slow.put(delta)
    slow.on(Event.HANG_UP)
    slow.drop()
    slow.put(pb.Delta(request_id="r", start=100, ending=ending()))
    assert slow.life is Life.ENDED
    assert not slow._batch.tokens


async def test_the_end_of_a_request_that_was_left_behind_is_asked_for() -> None:
    async with stack(max_unread_tokens=ROUND) as (scheduler, link, client):
        limits = common_pb.Limits(max_tokens=30)
        submit = scheduler.submitted["r"] = pb.Submit(request_id="r", prompt=ids("the"), limits=limits)
        stream = client.resume("r")
        first = asyncio.create_task(anext(stream))
        assert (await link.next("follow")).most_tokens == ROUND
        await link.send(deltas=deltas(submit, 0, ROUND))
        await first
        await stream.aclose()
        follow = await link.next("follow")
        if follow.offset == ROUND:  # it asked for more before the client hung up
            follow = await link.next("follow")
        assert (follow.offset, follow.most_tokens) == (BEYOND, 0)
        await link.next("cancel")


class Answering:
    """The scheduler's end: says each request's tokens from where the gateway asks, as fast as the link takes them."""

    def __init__(self, link: Link, tokens: int) -> None:
        self.link, self.tokens = link, tokens
        self.follows: dict[str, list[int]] = {}
        self.cancelled: list[str] = []
        self._submits: dict[str, pb.Submit] = {}

    async def run(self) -> None:
        while True:
            message = await self.link.received.get()
            if message.HasField("submit"):
                submit = message.submit
                self._submits[submit.request_id] = submit
                await self.link.send(accepted=[submit.request_id])
                await self._say(submit, 0)
            elif message.HasField("follow"):
                self.follows.setdefault(message.follow.request_id, []).append(message.follow.offset)
                await self._say(
                    self._submits[message.follow.request_id], message.follow.offset, message.follow.most_tokens
                )
            elif message.HasField("cancel"):
                self.cancelled.append(message.cancel.request_id)
                await self.link.delta(self._submits[message.cancel.request_id], 0, ending=ending())

    async def _say(self, submit: pb.Submit, start: int, most: int = 0) -> None:
        end = min(self.tokens, start + most) if most else self.tokens
        everything = deltas(submit, start, end)
        for at in range(0, len(everything), 200):
            await self.link.send(deltas=everything[at : at + 200])
        if end == self.tokens:
            await self.link.delta(submit, self.tokens, ending=ending())


@asynccontextmanager
async def serving(tokens: int, **settings: Any) -> AsyncIterator[tuple[Gateway, Link]]:
    scheduler = Scheduler()
    scheduler.serving = pb.Serving(ready=True, model=model_info(context_tokens=2 * tokens))
    await scheduler.start()
    async with gateway(scheduler, **settings) as served:
        link = await scheduler.link()
        async with AsyncClient(served.grpc, max_retries=0) as client:
            await client.ready(WAIT_S)
        yield served, link
    await scheduler.stop()


@asynccontextmanager
async def answering(tokens: int, **settings: Any) -> AsyncIterator[tuple[Gateway, Answering]]:
    async with serving(tokens, **settings) as (served, link):
        answers = Answering(link, tokens)
        saying = asyncio.create_task(answers.run())
        yield served, answers
        saying.cancel()


@asynccontextmanager
async def hesitant(served: Gateway, request_id: str, tokens: int) -> AsyncIterator[Any]:
    """A call whose HTTP/2 window stays at 64 kB, and of which nothing is read unless somebody does."""
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]
    async with grpc.aio.insecure_channel(served.grpc, options=options) as channel:
        request = inference_pb2.GenerateRequest(prompt="the", request_id=request_id, max_tokens=tokens)
        yield inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60)


async def test_a_client_that_stops_reading_costs_little_slows_nobody_and_misses_nothing() -> None:
    tokens = 30_000
    async with answering(tokens, max_unread_tokens=500) as (served, answers), hesitant(served, "slow", tokens) as call:
        chunks = aiter(call)
        offset = len((await anext(chunks)).token_ids)
        feeds = served.link.feeds

        async def behind() -> bool:
            return feeds["slow"][0].flow is Flow.BEHIND

        await until(behind)
        async with AsyncClient(served.grpc, max_retries=0) as quick, asyncio.timeout(WAIT_S):
            whole = await quick.complete("the", request_id="quick", max_tokens=tokens)
        assert len(whole.token_ids) == tokens
        assert len(feeds["slow"][0]._batch.tokens) < 500 + ROUND
        async for chunk in chunks:
            assert chunk.offset == offset
            offset += len(chunk.token_ids)
        assert offset == tokens
        assert answers.follows["slow"]
        assert not feeds


async def read_on(chunks: AsyncIterator[Any]) -> None:
    async for _ in chunks:
        pass


async def test_a_stream_that_nobody_reads_is_cut_and_its_request_does_as_it_was_to() -> None:
    tokens = 30_000
    settings = {"max_unread_tokens": 500, "stalled_s": 0.3}
    async with answering(tokens, **settings) as (served, answers), hesitant(served, "slow", tokens) as call:
        chunks = aiter(call)
        await anext(chunks)

        async def cancelled() -> bool:
            return answers.cancelled == ["slow"]

        await until(cancelled)
        with pytest.raises(grpc.aio.AioRpcError, match=r"nothing was read for 0\.3 s; Resume goes on") as cut:
            await read_on(chunks)
        assert cut.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

        async def forgotten() -> bool:
            return not served.link.feeds

        await until(forgotten)


async def until_stalled(served: Gateway, streams: int) -> None:
    async def stalled() -> bool:
        return served.front._stalled == streams

    await until(stalled)


async def test_a_stream_that_nobody_reads_is_cut_though_its_answer_has_ended() -> None:
    """The end lies in the gateway, behind tokens that nobody reads: there is no request to cancel."""
    tokens = 100_000  # far more than the client's window: their write waits
    async with (
        serving(tokens, max_unread_tokens=10**6, stalled_s=3.0) as (served, link),
        hesitant(served, "slow", tokens) as call,
    ):
        submit = await link.accept()
        (feed,) = served.link.feeds["slow"]
        await link.delta(submit, 0, [TOKEN] * (tokens - 1))

        async def written() -> bool:
            return feed.received == tokens - 1 and not feed._batch.tokens

        await until(written)
        await link.delta(submit, tokens - 1, [TOKEN], ending=ending())
        await until_stalled(served, 1)
        assert feed.life is Life.ENDED
        assert not feed._batch.tokens
        with pytest.raises(grpc.aio.AioRpcError, match="nothing was read for 3 s; Resume goes on") as cut:
            await read_on(aiter(call))
        assert cut.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await until_stalled(served, 0)


async def test_a_client_that_reads_the_last_chunk_late_has_all_of_the_answer() -> None:
    tokens = 100_000
    async with (
        serving(tokens, max_unread_tokens=10**6, stalled_s=0.1) as (served, link),
        hesitant(served, "slow", tokens) as call,
    ):
        submit = await link.accept()
        await link.delta(submit, 0, [TOKEN] * tokens, ending=ending())
        await until_stalled(served, 1)
        chunks = [chunk async for chunk in call]
        assert sum(len(chunk.token_ids) for chunk in chunks) == tokens
        assert chunks[-1].HasField("final")
        await until_stalled(served, 0)
