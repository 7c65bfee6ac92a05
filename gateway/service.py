"""laps_sd.v1.Inference: what the public calls do. The link, text and validation live beside it."""

import asyncio
import functools
import os
import time
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
from protos.times import seconds
from protos.v1 import inference_pb2, inference_pb2_grpc, status_pb2

Request = TypeVar("Request")
Response = TypeVar("Response")
Context: TypeAlias = Any  # grpc.aio.ServicerContext: grpc is not typed
TURNS = max(1, (os.cpu_count() or 1) // 2)  # long inputs of a tenant encoded at a time: a megabyte takes some seconds
STOPPED = "the gateway stopped before the answer was whole"
Handler = Callable[["Inference", Request, Context], Awaitable[Response]]


def answers_errors(handler: Handler[Request, Response]) -> Handler[Request, Response]:
    """The one place where an exception becomes a status."""

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
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by tenant, while in use
        self._running: set[asyncio.Task[Any] | None] = set()
        self._stalled = 0  # of them: nothing is kept for them, but the chunk that their client does not read
        self._idle = asyncio.Event()
        self._idle.set()

    async def drain(self, timeout_s: float, grace_s: float) -> None:
        """Take nothing new; running streams may end within `timeout_s`, those that do not are told within `grace_s`."""
        self.draining = True
        if not await self._idle_within(timeout_s):
            self.log.warning("drain_timed_out", live=len(self._running))
            self._link.give_up(NotServing(STOPPED))
            if not await self._idle_within(grace_s):
                self.over = True  # those that ask the scheduler something, or write to whoever does not read
                for call in filter(None, self._running):
                    call.cancel()

    async def _idle_within(self, timeout_s: float) -> bool:
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    # Coroutines that write, and no async generators: grpc.aio cancels them as soon as the client hangs up, even while a
    # write waits for a slow reader.
    @answers_errors
    async def Generate(  # type: ignore[override] # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        async with self._stream():
            model = self._model(ready=True)
            timeout_s = self._timeout_s(context)
            turns = self._turns.setdefault(tenant := caller.get().tenant, asyncio.Semaphore(TURNS))
            try:
                async with asyncio.timeout(timeout_s):
                    submit = await validate.submission(
                        request,
                        model,
                        tenant=tenant,
                        timeout_s=timeout_s,
                        max_input_bytes=self._settings.max_input_bytes,
                        turns=turns,
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
        """Counts it, while it runs and how it ended. Raises QueueFull."""
        self._running.add(call := asyncio.current_task())
        self._idle.clear()
        status = grpc.StatusCode.CANCELLED
        try:
            running = len(self._running) - self._stalled
            if max(running, len(self._link.feeds) + 1) > self._settings.max_requests:
                problem = f"{self._settings.max_requests} live requests at this gateway"
                raise QueueFull(problem, retry_after_ms=RETRY_AFTER_MS)
            # Without keys there are no tenants to tell apart.
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
        """`ready`: a worker must serve. Raises NotServing."""
        model = self._link.model
        if self.draining or model is None or (ready and not self._link.ready):
            raise NotServing("draining" if self.draining else "no warmed worker", retry_after_ms=RETRY_AFTER_MS)
        return model

    def _timeout_s(self, context: Context) -> float:
        remaining_s = context.time_remaining()  # None: the call has no deadline
        most_s = self._settings.request_timeout_s
        return most_s if remaining_s is None else min(remaining_s, most_s)

    async def _answer(self, feed: Feed, model: TextModel, context: Context, timeout_s: float, offset: int = 0) -> None:
        """Write the stream from token `offset` on. The text before it is made as well: the rest depends on it."""
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
                detokenizer.push(batch.skip(offset))
                if not batch.tokens and batch.ending is None:
                    continue
                if batch.start < offset:
                    # Or the client made it up. That cannot be told from tokens that were sent and lost.
                    raise Lost(f"the answer ended at token {batch.start}, offset {offset} is beyond it")
                chunk = inference_pb2.GenerateResponse(
                    request_id=feed.request_id,
                    text=detokenizer.push(batch.tokens),
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
        self._count(answer, prompt_tokens)

    async def _write(
        self, context: Context, chunk: inference_pb2.GenerateResponse, feed: Feed, deadline: float
    ) -> None:
        """Waits while the client does not read: HTTP/2 takes no more. If that lasts too long the request is left to
        itself; the client is told when it reads again, since no status can overtake the chunk, nor can that be taken
        back. Raises QueueFull; TimeoutError if its deadline passed meanwhile."""
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

    def _count(self, answer: Answer, prompt_tokens: int) -> None:
        metrics, final = self._metrics, answer.final(prompt_tokens)
        metrics.success.labels(answer.finish_reason).inc()
        metrics.prompt_tokens.inc(prompt_tokens)
        metrics.generation_tokens.inc(answer.tokens)
        metrics.preemptions.inc(final.preemptions)
        metrics.num_drafts.inc(final.spec_decode.num_drafts)
        metrics.num_draft_tokens.inc(final.spec_decode.num_draft_tokens)
        metrics.num_accepted_tokens.inc(final.spec_decode.num_accepted_tokens)
        metrics.queue_time.observe(seconds(final.queue_time))
        e2e_s = time.monotonic() - answer.started
        metrics.e2e.observe(e2e_s)
        if answer.ttft_s is not None:
            metrics.ttft.observe(answer.ttft_s)
            if answer.tokens > 1:
                metrics.tpot.observe((e2e_s - answer.ttft_s) / (answer.tokens - 1))

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


def _required_id(request_id: str) -> str:
    if not request_id:
        raise BadInput("request_id", "missing")
    if not REQUEST_ID.fullmatch(request_id):
        raise UnknownRequest("request_id: unknown")
    return request_id


def _own(request_id: str, tenant: str) -> None:
    """Another tenant's request is as unknown as one that never was."""
    if not caller.get().may_see(tenant):
        raise UnknownRequest(f"request {request_id} is unknown, or ended too long ago")
