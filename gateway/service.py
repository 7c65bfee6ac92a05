"""The calls of the public interface, laps_sd.v1.Inference. Validation, text and the link live in files of their own."""

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Any, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import grpc
import structlog

from gateway import validate
from gateway.access import caller
from gateway.answer import Answer
from gateway.config import RETRY_AFTER_MS, Settings
from gateway.feed import Feed
from gateway.link import Link
from gateway.metrics import Metrics
from gateway.shares import Shares
from gateway.text import TextModel
from protos.errors import (
    REQUEST_ID_KEY,
    BadInput,
    DeadlinePassed,
    Failed,
    Lost,
    NotServing,
    QueueFull,
    RequestError,
    UnknownRequest,
)
from protos.idempotence import REQUEST_ID
from protos.serving import abort, trace
from protos.v1 import inference_pb2, inference_pb2_grpc, status_pb2

Request = TypeVar("Request")
Response = TypeVar("Response")
Context: TypeAlias = Any  # grpc.aio.ServicerContext: grpc is not typed
ENCODERS = max(1, (os.cpu_count() or 1) // 2)  # long inputs of one tenant encoded at a time; a megabyte takes seconds
STOPPED = "the gateway stopped before the answer was whole"
Handler = Callable[["Inference", Request, Context], Awaitable[Response]]


def answers_errors(handler: Handler[Request, Response]) -> Handler[Request, Response]:
    """The one place where an exception becomes a gRPC status."""

    @functools.wraps(handler)
    async def call(self: "Inference", request: Request, context: Context) -> Response:
        try:
            return await handler(self, request, context)
        except RequestError as error:
            answer = error
        except asyncio.CancelledError:
            if not self.over:
                raise
            answer = NotServing(STOPPED)
        except Exception as error:
            self.log.error("unexpected", call=handler.__name__, trace=trace(error))
            answer = Failed("internal error")
        await abort(context, answer)
        raise AssertionError("abort raises")

    return call


class Inference(inference_pb2_grpc.InferenceServicer):
    def __init__(self, settings: Settings, link: Link, metrics: Metrics) -> None:
        self.draining = self.over = False
        self.log = structlog.get_logger()
        self._settings = settings
        self._link = link
        self._metrics = metrics
        self._streams = Shares(settings.max_requests, "streams of this gateway", RETRY_AFTER_MS)
        self._encoders: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by tenant, while in use
        self._running: set[asyncio.Task[Any] | None] = set()
        self._stalled = 0  # calls among them that were cut off and wait for their client to read the last chunk
        self._idle = asyncio.Event()
        self._idle.set()

    async def drain(self, timeout_s: float, grace_s: float) -> None:
        """Take no new calls, and give running streams `timeout_s` to end. Those that do not end have `grace_s` to tell
        their clients so."""
        self.draining = True
        if not await self._idle_within(timeout_s):
            self.log.warning("drain_timed_out", live=len(self._running))
            await self._link.give_up(NotServing(STOPPED))
            if not await self._idle_within(grace_s):
                self.over = True  # these calls wait for the scheduler, or for a client that does not read
                for call in filter(None, self._running):
                    call.cancel()

    async def _idle_within(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    # Handlers are coroutines that write, not async generators: grpc.aio cancels a coroutine as soon as its client hangs
    # up, even while a write waits for a slow reader.
    @answers_errors
    async def Generate(  # type: ignore[override] # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        async with self._stream():
            model = self._model(ready=True)
            timeout_s = self._timeout_s(context)
            encoders = self._encoders.setdefault(tenant := caller.get().tenant, asyncio.Semaphore(ENCODERS))
            try:
                async with asyncio.timeout(timeout_s):
                    submit = await validate.submission(
                        request,
                        model,
                        tenant=tenant,
                        timeout_s=timeout_s,
                        max_input_bytes=self._settings.max_input_bytes,
                        encoders=encoders,
                    )
            except TimeoutError:
                raise DeadlinePassed(f"not even begun within {timeout_s:g} s") from None
            await self._answer(self._link.submit(submit), model, context, self._timeout_s(context))

    @answers_errors
    async def Resume(  # type: ignore[override] # noqa: N802
        self, request: inference_pb2.ResumeRequest, context: Context
    ) -> None:
        async with self._stream():
            model = self._model()
            submit = await self._link.scheduler.submission(_required_id(request.request_id))
            _own(request.request_id, submit.tenant)
            await self._answer(self._link.follow(submit), model, context, self._timeout_s(context), request.offset)

    @asynccontextmanager
    async def _stream(self) -> AsyncIterator[None]:
        """Count a streaming call while it runs, and how it ended. Raises QueueFull if there are too many."""
        self._running.add(call := asyncio.current_task())
        self._idle.clear()
        status = grpc.StatusCode.CANCELLED
        try:
            running = len(self._running) - self._stalled
            if max(running, len(self._link.feeds) + 1) > self._settings.max_requests:
                problem = f"{self._settings.max_requests} live requests at this gateway"
                raise QueueFull(problem, retry_after_ms=RETRY_AFTER_MS)
            # Without keys all callers are one tenant, and have nobody to share with.
            with self._streams.place(caller.get().tenant) if self._settings.api_keys else nullcontext():
                yield
            status = grpc.StatusCode.OK
        except RequestError as error:
            status = error.code
            raise
        finally:
            self._metrics.requests.labels(status.name).inc()
            self._running.discard(call)
            if not self._running:
                self._idle.set()

    def _model(self, *, ready: bool = False) -> TextModel:
        """The model that requests are encoded for. `ready`: a worker must be there to run it. Raises NotServing."""
        model = self._link.model
        if self.draining or model is None or (ready and not self._link.ready):
            raise NotServing("draining" if self.draining else "no warmed worker", retry_after_ms=RETRY_AFTER_MS)
        return model

    def _timeout_s(self, context: Context) -> float:
        remaining_s = context.time_remaining()  # None: the call has no deadline
        most_s = self._settings.request_timeout_s
        return most_s if remaining_s is None else min(remaining_s, most_s)

    async def _answer(self, feed: Feed, model: TextModel, context: Context, timeout_s: float, offset: int = 0) -> None:
        """Write the stream from output token `offset` on. The text before it is made too: the rest depends on it."""
        answer, submit = Answer(), feed.submit
        prompt_tokens = len(submit.prompt)
        log = self.log.bind(request_id=feed.request_id)
        log.info(
            "streaming",
            tenant=submit.tenant,
            prompt_tokens=prompt_tokens,
            max_tokens=submit.limits.max_tokens,
            offset=offset,
        )
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                await feed.until_accepted()
                await context.send_initial_metadata(((REQUEST_ID_KEY, feed.request_id),))
            detokenizer = model.detokenizer(submit.limits.stop, submit.limits.min_tokens)
            while answer.ending is None:
                async with asyncio.timeout_at(deadline):
                    batch = await self._link.take(feed)
                answer.add(batch)
                await detokenizer.push_in_turns(batch.skip(offset))
                if not batch.tokens and batch.ending is None:
                    continue
                if batch.start < offset:
                    # Either tokens that the client got are lost, or it made the offset up: they look the same.
                    raise Lost(f"the answer ended at token {batch.start}, offset {offset} is beyond it")
                chunk = inference_pb2.GenerateResponse(
                    request_id=feed.request_id,
                    text=await detokenizer.push_in_turns(batch.tokens),
                    token_ids=batch.tokens,
                    offset=batch.start,
                    rounds=batch.rounds,
                    logprobs=batch.logprobs,
                )
                if batch.ending is not None:
                    chunk.text += detokenizer.finish()
                    chunk.final.CopyFrom(answer.final(prompt_tokens))
                await self._write(context, chunk, feed, deadline)
        except TimeoutError:
            raise DeadlinePassed(f"not finished within {timeout_s:g} s") from None
        finally:
            self._link.leave(feed)
            log.info("ended", **answer.summary())
        self._metrics.finished(answer, prompt_tokens)

    async def _write(
        self, context: Context, chunk: inference_pb2.GenerateResponse, feed: Feed, deadline: float
    ) -> None:
        """Write a chunk. While the client does not read, HTTP/2 takes no more and the write waits. If that lasts too
        long the stream is left. The client hears of it when it reads again: no status can overtake the chunk,
        and the chunk cannot be taken back. Raises QueueFull; TimeoutError if the deadline passed meanwhile."""
        loop, cut = asyncio.get_running_loop(), False

        def cut_off() -> None:
            nonlocal cut
            cut = self._link.leave(feed)
            self._stalled += cut

        patience = loop.call_at(min(loop.time() + self._settings.stalled_s, deadline), cut_off)
        try:
            await context.write(chunk)
        finally:
            patience.cancel()
            self._stalled -= cut
        if cut and loop.time() < deadline:
            more = f"Resume goes on from token {chunk.offset + len(chunk.token_ids)}"
            raise QueueFull(f"nothing was read for {self._settings.stalled_s:g} s; {more}, if it was to run on")
        if cut:
            raise TimeoutError

    @answers_errors
    async def Cancel(  # noqa: N802
        self, request: inference_pb2.CancelRequest, context: Context
    ) -> inference_pb2.CancelResponse:
        if (feeds := self._link.feeds.get(_required_id(request.request_id))) is not None:
            _own(request.request_id, feeds[0].submit.tenant)
        else:
            answer = await self._link.scheduler.get_request(
                inference_pb2.GetRequestRequest(request_id=request.request_id)
            )
            _own(request.request_id, answer.request.tenant)
        self._link.cancel(request.request_id)
        return inference_pb2.CancelResponse()

    @answers_errors
    async def GetRequest(  # noqa: N802
        self, request: inference_pb2.GetRequestRequest, context: Context
    ) -> inference_pb2.GetRequestResponse:
        _required_id(request.request_id)
        answer = await self._link.scheduler.get_request(request)
        _own(request.request_id, answer.request.tenant)
        return answer

    @answers_errors
    async def ListRequests(  # noqa: N802
        self, request: inference_pb2.ListRequestsRequest, context: Context
    ) -> inference_pb2.ListRequestsResponse:
        return await self._link.scheduler.list_requests(request)

    @answers_errors
    async def Stats(self, request: inference_pb2.StatsRequest, context: Context) -> status_pb2.StatsResponse:  # noqa: N802
        return await self._link.scheduler.stats(request)

    @answers_errors
    async def ComparePolicies(  # noqa: N802
        self, request: inference_pb2.ComparePoliciesRequest, context: Context
    ) -> inference_pb2.ComparePoliciesResponse:
        return await self._link.scheduler.compare_policies(request)


def _required_id(request_id: str) -> str:
    if not request_id:
        raise BadInput("request_id", "missing")
    if not REQUEST_ID.fullmatch(request_id):
        raise UnknownRequest("request_id: unknown")
    return request_id


def _own(request_id: str, tenant: str) -> None:
    """Raises UnknownRequest for a request of another tenant: the caller must not learn that it exists."""
    if not caller.get().may_see(tenant):
        raise UnknownRequest(f"request {request_id} is unknown, or ended too long ago")
