"""The page's frames to all who look: one producer asks the scheduler, for however many, and nobody asks while nobody
looks. A viewer that reads slowly skips frames. What is in a frame is the business of frames.py."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog

from gateway.config import RETRY_AFTER_MS
from gateway.front import Front
from gateway.page.frames import MOST_REQUESTS, ROUNDS, Frames
from protos.errors import QueueFull, RequestError
from protos.logs import trace
from protos.v1 import inference_pb2

EVERY_S = 0.25
SHARE = 10  # an answer that takes long is asked for so much more rarely: the scheduler has other work
LONGEST_S = 10.0  # between two questions: it may take long because the scheduler was away, and has come back
MOST_VIEWERS = 32
VIEW_S = 300.0  # then the browser connects again, by itself: its key may have been revoked, and its cookie is renewed
RETRY = "retry: 1000\n\n"  # milliseconds, after which a browser whose stream broke connects again


class FrameFeed:
    def __init__(self, front: Front, every_s: float = EVERY_S) -> None:
        self._front, self._every_s, self._clock = front, every_s, time.monotonic
        self._viewers = 0
        self._producer: asyncio.Task[None] | None = None
        self._newest: str | None = None
        self._number = 0  # of the newest frame
        self._news = asyncio.Condition()
        self._log = structlog.get_logger()

    @asynccontextmanager
    async def view(self) -> AsyncIterator[AsyncIterator[str]]:
        """Server-sent events (WHATWG HTML, 9.2): the frames from now on, each the newest there is. They end once the
        gateway drains. Raises QueueFull."""
        self.look_for_room()
        self._viewers += 1
        if self._producer is None:
            self._producer = asyncio.create_task(self._produce(), name="page feed")
        try:
            yield self._events()
        finally:
            self._viewers -= 1
            if not self._viewers:
                self._producer.cancel()
                self._producer = self._newest = None

    def look_for_room(self) -> None:
        """Raises QueueFull."""
        if self._viewers >= MOST_VIEWERS:
            raise QueueFull(f"{MOST_VIEWERS} people look at the page already", retry_after_ms=RETRY_AFTER_MS)

    async def _events(self) -> AsyncIterator[str]:
        yield RETRY
        seen = 0 if self._newest else self._number  # 0: no frame has that number
        while True:
            async with self._news:
                while self._number == seen and not self._front.draining:
                    await self._news.wait()
            if self._newest is None or self._front.draining:
                return
            seen = self._number
            yield f"data: {self._newest}\n\n"

    async def _produce(self) -> None:
        frames = Frames()
        while not self._front.draining:
            asked_at = self._clock()
            self._newest = await self._frame(frames)
            self._number += 1
            async with self._news:
                self._news.notify_all()
            await asyncio.sleep(max(self._every_s, min(SHARE * (self._clock() - asked_at), LONGEST_S)))
        async with self._news:
            self._news.notify_all()

    async def _frame(self, frames: Frames) -> str:
        """The scheduler's present answer, or why there is none."""
        page = inference_pb2.ListRequestsRequest(page_size=MOST_REQUESTS, recent_rounds=ROUNDS)
        try:
            stats = await self._front.stats(inference_pb2.StatsRequest())
            return frames.frame(stats, await self._front.list_requests(page))
        except RequestError as error:
            return json.dumps({"problem": error.message})
        except Exception as error:  # those who look must not wait for ever
            self._log.error("unexpected", trace=trace(error))
            return json.dumps({"problem": "internal error"})
