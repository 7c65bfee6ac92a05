"""The feed: one producer for all who look, nothing asked while nobody does, and nobody waits for a slow reader."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from gateway.page import feed as feeds
from gateway.page.feed import FrameFeed
from protos.errors import QueueFull
from tests.gateway.harness import Scheduler, gateway
from tests.gateway.page.pages import Watched, next_of, page, waiting, watching
from tests.waiting import until


async def test_a_viewer_gets_frame_after_frame() -> None:
    async with page() as (_, scheduler, _, client), watching(client) as frames:
        scheduler.known["a"] = waiting()
        while not (told := await next_of(frames))["requests"]:
            pass
        assert told["policy"] == "gittins"
        assert told["requests"][0]["passed_by"] == ["b"]


async def test_nothing_is_asked_while_nobody_looks() -> None:
    async with page() as (_, scheduler, _, client):
        assert scheduler.stats_asked == 0
        async with watching(client) as frames:
            await next_of(frames)

        async def quiet() -> bool:
            return all(task.get_name() != "page feed" for task in asyncio.all_tasks())

        await until(quiet)


async def test_viewers_share_one_producer() -> None:
    scheduler = Watched()
    await scheduler.start()
    async with gateway(scheduler) as served:
        await scheduler.link()
        feed = FrameFeed(served.front, every_s=0.01)
        async with AsyncExitStack() as stack:
            views = [await stack.enter_async_context(feed.view()) for _ in range(5)]
            for view in views:
                assert await anext(view) == feeds.RETRY
            first = [await anext(view) for view in views]
            assert len(set(first)) == 1
            asked = scheduler.stats_asked
            assert asked <= 2
    await scheduler.stop()


async def test_a_slow_viewer_skips_frames_and_gets_the_newest() -> None:
    scheduler = Watched()
    await scheduler.start()
    async with gateway(scheduler) as served:
        await scheduler.link()
        feed = FrameFeed(served.front, every_s=0.001)
        async with feed.view() as slow, feed.view() as quick:
            await anext(slow), await anext(slow)
            await anext(quick)
            scheduler.told.policy = "las"
            while '"las"' not in await anext(quick):
                pass
            assert '"las"' in await anext(slow)
    await scheduler.stop()


async def test_after_an_answer_that_took_long_the_next_one_comes_soon_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "SHARE", 1e9)
    monkeypatch.setattr(feeds, "LONGEST_S", 0.01)
    async with page() as (_, _, _, client), watching(client) as frames:
        for _ in range(3):
            await next_of(frames)


async def test_a_question_without_a_body_gets_no_stream() -> None:
    async with page() as (_, scheduler, _, client):
        headers = (await client.head("/page/feed")).headers
        assert (headers["content-type"], headers["x-accel-buffering"]) == ("text/event-stream", "no")
        assert scheduler.stats_asked == 0


async def test_the_number_of_viewers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "MOST_VIEWERS", 1)
    async with page() as (_, _, _, client), watching(client) as frames:
        await next_of(frames)
        refused = await client.get("/page/feed")
        assert refused.status_code == 429
        assert "1 people look at the page already" in refused.json()["error"]["message"]
        session = (await client.get("/page/session")).json()
        assert session == {"open": False, "keyed": False, "problem": "1 people look at the page already"}


async def test_a_place_is_free_again_once_a_viewer_has_gone() -> None:
    async with page() as (served, _, _, _):
        feed = FrameFeed(served.front)
        async with feed.view():
            assert feed._producer
        assert not feed._producer
        async with feed.view() as view:
            await anext(view)
            assert '"policy"' in await anext(view)


async def test_without_a_scheduler_the_frame_says_so() -> None:
    async with gateway(Scheduler()) as served:
        feed = FrameFeed(served.front)
        async with feed.view() as view:
            await anext(view)
            assert '"problem": "the scheduler cannot be reached' in await anext(view)


async def test_a_feed_ends_when_the_gateway_drains() -> None:
    async with page() as (served, _, _, client), watching(client) as frames:
        await next_of(frames)
        await served.drain(0)
        async with asyncio.timeout(60):
            async for _ in frames:
                pass


async def test_a_viewer_beyond_the_bound_is_told_before_anything_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async with page() as (served, _, _, _):
        feed = FrameFeed(served.front)
        monkeypatch.setattr(feeds, "MOST_VIEWERS", 0)
        with pytest.raises(QueueFull):
            async with feed.view():
                pass
