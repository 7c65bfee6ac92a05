"""The client for asyncio. Which calls are repeated, and what is said in them, is decided in attempts.py and base.py."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any, Self, Unpack

import grpc

from laps_sd.client.attempts import FIRST_PAUSE_S, Attempts
from laps_sd.client.base import CLOSED, SERVING, Base, Connection
from laps_sd.client.completion import Collector, Completion
from laps_sd.client.params import Params
from laps_sd.client.reading import read
from laps_sd.client.results import Chunk, PolicyComparison, RequestPage, RequestStatus, Stats
from laps_sd.client.wire import NotServing, inference_pb2


class AsyncClient(Base):
    """`async with AsyncClient() as client: print((await client.complete("Hi", max_tokens=20)).text)`.

    Every call raises a RequestError. A client may be used by many tasks, in one event loop at a time.
    """

    _opened: tuple[asyncio.AbstractEventLoop, list[Connection]] | None = None
    _closed = 0  # how often

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Hangs up: calls that run raise NotServing. A later call opens new connections."""
        opened, self._opened = self._opened, None
        self._closed += 1
        for each in opened[1] if opened else []:
            await each.channel.close()

    def _to(self, at: int, closed: int | None = None) -> Connection:
        """The connection to target number `at`. An event loop cannot use another's. `closed`: how often the client had
        been when the call began (None: it begins now); raises NotServing if it was since."""
        if closed not in (None, self._closed):
            raise NotServing(CLOSED)
        loop = asyncio.get_running_loop()
        if self._opened is None or self._opened[0] is not loop:
            self._opened = loop, self._open(grpc.aio)
        return self._opened[1][at % len(self._opened[1])]

    def generate(
        self, prompt: str | None = None, *, timeout_s: float | None = None, **params: Unpack[Params]
    ) -> AsyncGenerator[Chunk, None]:
        """The chunks of an answer as they come. Closing the iterator hangs up, which does what `on_disconnect` says.

        Given `on_disconnect="detach"` the stream survives a lost connection or gateway: the request is sent again under
        its id, which is drawn here if none was given, and the stream continues where it broke off. It is given up after
        half a minute without an answer. A connection that lasts longer counts as one, for a queue may be long: only
        `timeout_s` bounds that.
        """
        return self._chunks(self._generating("generate", prompt, timeout_s, params))

    def resume(
        self, request_id: str, offset: int = 0, *, timeout_s: float | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """The chunks of a request from output token `offset` on. A broken stream is continued, as a detached one is."""
        return self._chunks(self._resuming(request_id, offset, timeout_s))

    async def _chunks(self, attempts: Attempts) -> AsyncGenerator[Chunk, None]:
        closed = self._closed
        while not attempts.whole:
            at = self._at
            call = self._stream_call(self._to(at, closed), attempts)
            try:
                with self._told_if_closed(closed):
                    async for message in call:
                        yield attempts.got(message)
                attempts.ended()
                return
            except grpc.RpcError as error:
                if attempts.whole:
                    return
                pause_s = await self._pause_s(attempts, error, at)
            finally:
                call.cancel()
            await asyncio.sleep(pause_s)

    async def complete(
        self, prompt: str | None = None, *, timeout_s: float | None = None, **params: Unpack[Params]
    ) -> Completion:
        """The whole answer of `generate`, which takes the same arguments."""
        collector = Collector()
        async for chunk in self._chunks(self._generating("complete", prompt, timeout_s, params)):
            collector.add(chunk)
        return collector.completion()

    async def cancel(self, request_id: str) -> None:
        """End a request at once."""
        await self._ask("Cancel", self._asking(inference_pb2.CancelRequest(), request_id=request_id))

    async def status(self, request_id: str) -> RequestStatus:
        """The state of one request: why does it wait, how far is it?"""
        asked = self._asking(inference_pb2.GetRequestRequest(), request_id=request_id)
        return read(RequestStatus, (await self._ask("GetRequest", asked)).request)

    async def list_requests(self, page_size: int = 0, page_token: str = "", recent_rounds: int = 0) -> RequestPage:
        """One page of the live requests, those that run first. `page_token`: `next_page_token` of the page before.
        `recent_rounds`: so many of each request's last rounds are told, too."""
        request = inference_pb2.ListRequestsRequest()
        asked = self._asking(request, page_size=page_size, page_token=page_token, recent_rounds=recent_rounds)
        return read(RequestPage, await self._ask("ListRequests", asked))

    async def compare_policies(self) -> PolicyComparison:
        """The policies side by side on the requests that ended in the last minutes, by the simulator."""
        asked = self._asking(inference_pb2.ComparePoliciesRequest())
        return read(PolicyComparison, await self._ask("ComparePolicies", asked))

    async def drain_worker(self, worker_id: str, *, force: bool = False) -> int:
        """Have a worker end: what runs there goes on elsewhere at last. Returns how many workers remain; `force`: even
        none. Raises UnknownRequest for a worker that is not attached, Incompatible for the last one. A broken
        call is not repeated: asked twice, the worker may be gone."""
        asked = self._asking(inference_pb2.DrainWorkerRequest(), again=False, worker_id=worker_id, force=force)
        return int((await self._ask("DrainWorker", asked)).remaining)

    async def stats(self) -> Stats:
        """Figures of the whole service."""
        return read(Stats, await self._ask("Stats", self._asking(inference_pb2.StatsRequest())))

    async def ready(self, timeout_s: float | None = 60.0) -> None:
        """Returns once a warmed worker serves; raises NotServing after `timeout_s` seconds (None: never), or as soon as
        it is clear that waiting is of no use."""
        attempts, cause, closed = self._waiting(timeout_s), None, self._closed
        while True:
            at, pause_s = self._at, FIRST_PAUSE_S
            call = self._health_call(self._to(at, closed), attempts)
            try:
                with self._told_if_closed(closed):
                    async for answer in call:
                        if answer.value == SERVING:
                            return
                        if len(self._server.targets) > 1:
                            break  # another gateway may serve
            except grpc.RpcError as error:
                cause = await asyncio.to_thread(self._cause, attempts, error, at)
                if (again_s := self._wait_s(attempts, error, cause)) is None:
                    raise self._not_ready(attempts, error, cause) from error
                pause_s = again_s
            finally:
                call.cancel()
            self._at = at + 1
            await asyncio.sleep(pause_s)

    async def _ask(self, method: str, attempts: Attempts) -> Any:
        closed = self._closed
        while True:
            at = self._at
            try:
                with self._told_if_closed(closed):
                    return await self._call(self._to(at, closed), method, attempts)
            except grpc.RpcError as error:
                pause_s = await self._pause_s(attempts, error, at)
            await asyncio.sleep(pause_s)

    @contextmanager
    def _told_if_closed(self, closed: int) -> Iterator[None]:
        """gRPC cancels what waits on a connection that `close` ends. That is no cancellation of the task: it raises
        NotServing. `closed`: as in `_to`."""
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed == closed or (task and task.cancelling()):
                raise
            raise NotServing(CLOSED) from None

    async def _pause_s(self, attempts: Attempts, error: grpc.RpcError, at: int) -> float:
        """Seconds until the next attempt, at the next target. Raises the RequestError that ends the call."""
        self._at = at + 1
        if (pause_s := attempts.pause_s(error, len(self._server.targets))) is None:
            raise self._failure(attempts, error, await asyncio.to_thread(self._cause, attempts, error, at)) from error
        return pause_s
