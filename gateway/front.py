"""The front: it checks, submits and counts requests and streams their answers, for every door alike. No transport lives
here. `gateway.access.caller` says who asks."""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any
from weakref import WeakValueDictionary

import grpc
import structlog

from gateway import validate
from gateway.access import caller
from gateway.beginnings import beginning
from gateway.cells import Cells, priority_of
from gateway.config import RETRY_AFTER_MS, Settings
from gateway.feed import Feed
from gateway.ids import owned, required_id
from gateway.link import Link
from gateway.metrics import Metrics
from gateway.rights import Right
from gateway.several import together
from gateway.shares import Shares
from gateway.stream import Stream
from gateway.structure import Loosen, Structures
from gateway.text import TextModel
from gateway.tracing import CallSpan, operation, traced
from protos.errors import BadInput, DeadlinePassed, Failed, Lost, NotServing, QueueFull, RequestError, UnknownModel
from protos.tracing import Tracing
from protos.v1 import inference_pb2, status_pb2

ENCODERS = max(1, (os.cpu_count() or 1) // 2)  # long inputs of one tenant encoded at a time; a megabyte takes seconds
STOPPED = "the gateway stopped before the answer was whole"


class Front:
    """Every method raises RequestError for what its client did wrong, or must be told."""

    def __init__(self, settings: Settings, cells: Cells, metrics: Metrics, tracing: Tracing | None = None) -> None:
        self.draining = False
        self._over = False  # answers that still run are cut
        self._settings, self._cells, self._metrics, self._tracing = settings, cells, metrics, tracing
        self._streams = Shares(settings.max_requests, "streams of this gateway", RETRY_AFTER_MS)
        self.most_at_once = self._streams.most if settings.api_keys else settings.max_requests  # of one caller
        self._encoders: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()  # by tenant, while in use
        self._structures = Structures()
        self._running: dict[object, asyncio.Task[Any] | None] = {}  # each open stream, and the task that reads it
        self._stalled = 0  # streams among them that were cut off and wait for their client to read the last chunk
        self._idle = asyncio.Event()
        self._idle.set()
        self._log = structlog.get_logger()

    @property
    def ready(self) -> bool:
        """Whether a new request would be served."""
        return self._cells.ready and not self.draining

    def takes(self, model: str) -> bool:
        """Whether a new request for this model would be served."""
        return not self.draining and bool(self._cells.able(model))

    @property
    def max_input_bytes(self) -> int:
        return self._settings.max_input_bytes

    def models(self, *, ready: bool = False) -> dict[str, TextModel]:
        """The models that are served, by name: at least one. `ready`: a worker must be there. Raises NotServing."""
        models = self._cells.models(ready=ready)
        if self.draining or not models:
            raise NotServing("draining" if self.draining else "no warmed worker", retry_after_ms=RETRY_AFTER_MS)
        return models

    def model(self, name: str = "", *, ready: bool = False) -> TextModel:
        """The model of that name; empty: the only one. Raises NotServing, UnknownModel, BadInput."""
        models = self.models(ready=ready)
        if not name and len(known := self.models()) > 1:  # also while only one of them has a worker
            raise BadInput("model", f"name one of {', '.join(known)}")
        if name and name not in models:
            if name in self.models():
                raise NotServing("no warmed worker", retry_after_ms=RETRY_AFTER_MS)
            raise UnknownModel(f"model: there is no such model; this service has {', '.join(models)}")
        return models[name] if name else next(iter(models.values()))

    def new_id(self, request: inference_pb2.GenerateRequest, model: str, bare: str = "") -> str:
        """An id for a new request for this model; `bare`: one that was drawn already. Raises what `model` does."""
        model, begins = self.model(model, ready=True).name, beginning(request, caller.get().tenant)
        return self._cells.new_id(model, priority_of(request.priority), bare or uuid.uuid4().hex, begins)

    async def _home(self, request_id: str, model: str | None = None, *, ready: bool = False) -> tuple[Link, TextModel]:
        """The cell of a request, and its model. Raises NotServing, UnknownModel."""
        link = await self._cells.home(request_id, model)
        if self.draining or link.model is None or (ready and not link.ready):
            raise NotServing("draining" if self.draining else "no warmed worker", retry_after_ms=RETRY_AFTER_MS)
        if model and link.model.name != model:
            raise UnknownModel(f"model: the cell of this id serves {link.model.name}")
        return link, link.model

    @asynccontextmanager
    async def generate(
        self,
        request: inference_pb2.GenerateRequest,
        timeout_s: float | None = None,
        default_max_tokens: int | None = validate.DEFAULT_MAX_TOKENS,
        loosen: Loosen | None = None,
        encoded: dict[str, list[int]] | None = None,
    ) -> AsyncIterator[Stream]:
        """The answer to a new request. Leaving the block before the answer's end hangs up, which does what
        `on_disconnect` says. `timeout_s`: the answer must be whole by then; None: as long as the settings allow.
        `default_max_tokens`, `loosen`, `encoded`: as in validate.submission."""
        async with self._called(operation(request)) as call:
            deadline, wanted = self._deadline(timeout_s), self.model(request.model, ready=True).name
            request_id = request.request_id or self.new_id(request, wanted)
            link, model = await self._home(request_id, wanted, ready=True)
            try:
                async with asyncio.timeout_at(deadline):
                    submit = await validate.submission(
                        request,
                        model,
                        request_id=request_id,
                        tenant=caller.get().tenant,
                        timeout_s=_until(deadline),
                        max_input_bytes=self._settings.max_input_bytes,
                        encoders=self.encoders(),
                        structures=self._structures,
                        default_max_tokens=default_max_tokens,
                        loosen=loosen,
                        encoded=encoded,
                    )
            except TimeoutError:
                raise DeadlinePassed("not even begun within the time that it was given") from None
            submit.traceparent = call.traceparent
            async with self._opened(link, link.submit(submit), model, 0, _until(deadline), call) as stream:
                yield stream

    @asynccontextmanager
    async def resume(self, request_id: str, offset: int = 0, timeout_s: float | None = None) -> AsyncIterator[Stream]:
        """The answer to a request that was submitted before, here or elsewhere, from output token `offset` on."""
        async with self._called("resume") as call:
            deadline = self._deadline(timeout_s)
            link, model = await self._home(required_id(request_id))
            submit = await link.scheduler.submission(request_id)
            owned(request_id, submit.tenant)
            if submit.model_fingerprint not in ("", model.fingerprint):
                raise Lost(f"{request_id} was submitted for a model that is served no more, and is no text here")
            async with self._opened(link, link.follow(submit), model, offset, _until(deadline), call) as stream:
                yield stream

    @asynccontextmanager
    async def _called(self, operation: str) -> AsyncIterator[CallSpan]:
        with traced(self._tracing, operation) as call:
            async with self._counted():
                yield call

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        """Count a stream while it is open, and how it ended. Raises QueueFull if there are too many."""
        self._running[place := object()] = asyncio.current_task()
        self._idle.clear()
        status = Failed.code  # of a mistake of ours: what the door tells the client then
        try:
            running, most = len(self._running) - self._stalled, self._settings.max_requests
            if max(running, self._cells.live + 1) > most:
                raise QueueFull(f"{most} live requests at this gateway", retry_after_ms=RETRY_AFTER_MS)
            # Without keys all callers are one tenant, and have nobody to share with.
            with self._streams.place(caller.get().tenant) if self._settings.api_keys else nullcontext():
                yield
            status = grpc.StatusCode.OK
        except RequestError as error:
            status = error.code
            raise
        except asyncio.CancelledError:
            status = NotServing.code if self._over else grpc.StatusCode.CANCELLED
            if not self._over:
                raise
            raise NotServing(STOPPED) from None
        finally:
            self._metrics.requests[status.name] += 1
            del self._running[place]
            if not self._running:
                self._idle.set()

    @asynccontextmanager
    async def _opened(
        self, link: Link, feed: Feed, model: TextModel, offset: int, timeout_s: float, call: CallSpan
    ) -> AsyncIterator[Stream]:
        call.submitted(model.name, feed.submit)
        stream = Stream(
            feed,
            model,
            link=link,
            metrics=self._metrics,
            offset=offset,
            timeout_s=timeout_s,
            stalled_s=self._settings.stalled_s,
            count_stalled=self._count_stalled,
        )
        log = self._log.bind(request_id=stream.request_id)
        log.info(
            "streaming",
            tenant=feed.submit.tenant,
            prompt_tokens=stream.prompt_tokens,
            max_tokens=feed.submit.limits.max_tokens,
            offset=offset,
        )
        try:
            yield stream
        finally:
            call.answered(stream.answer)
            log.info("ended", **stream.close())

    def _count_stalled(self, more: int) -> None:
        self._stalled += more

    async def encode(self, request: inference_pb2.GenerateRequest, *, special: bool = True) -> list[int]:
        """Token ids for the model; `special`: with those that the tokenizer adds. Raises BadInput, NotServing."""
        most_bytes, encoders = self._settings.max_input_bytes, self.encoders()
        return await validate.encode_input(request, self.model(request.model), most_bytes, encoders, special=special)

    def encoders(self) -> asyncio.Semaphore:
        """Of the caller's tenant."""
        return self._encoders.setdefault(caller.get().tenant, asyncio.Semaphore(ENCODERS))

    def _deadline(self, timeout_s: float | None) -> float:
        """On the event loop's clock."""
        most_s = self._settings.request_timeout_s
        return asyncio.get_running_loop().time() + (most_s if timeout_s is None else min(timeout_s, most_s))

    async def cancel(self, request_id: str) -> bool:
        """End a request at once. Returns whether there was anything to end: it was live."""
        link = await self._cells.home(required_id(request_id))
        if (feeds := link.feeds.get(request_id)) is not None:
            owned(request_id, feeds[0].submit.tenant)
        else:
            known = await self.get_request(inference_pb2.GetRequestRequest(request_id=request_id))
            if known.request.state == status_pb2.REQUEST_STATE_FINISHED:
                return False
        link.cancel(request_id)
        return True

    async def get_request(self, request: inference_pb2.GetRequestRequest) -> inference_pb2.GetRequestResponse:
        """The state of one request of the caller's. Only an administrator hears whose requests passed it."""
        required_id(request.request_id)
        answer = await self._cells.get_request(request)
        owned(request.request_id, answer.request.tenant)
        if Right.ADMIN not in caller.get().rights:
            answer.request.ClearField("passed_by")
        return answer

    async def list_requests(self, request: inference_pb2.ListRequestsRequest) -> inference_pb2.ListRequestsResponse:
        """Live requests of all tenants, cell by cell. The door has checked the right."""
        return await self._cells.list_requests(request)

    async def stats(self, request: inference_pb2.StatsRequest) -> status_pb2.StatsResponse:
        """Figures of the whole service. The door has checked the right."""
        answers = await self._cells.ask_all(lambda link: link.scheduler.stats(request))
        return next(iter(answers.values())) if self._cells.alone else together(answers)

    async def drain_worker(self, request: inference_pb2.DrainWorkerRequest) -> inference_pb2.DrainWorkerResponse:
        """Have a worker end. The door has checked the right."""
        if not request.worker_id:
            raise BadInput("worker_id", "missing")
        link, worker = self._cells.named(request.worker_id)
        asked = inference_pb2.DrainWorkerRequest(worker_id=worker, force=request.force)
        return await link.scheduler.drain_worker(asked)

    async def compare_policies(
        self, request: inference_pb2.ComparePoliciesRequest
    ) -> inference_pb2.ComparePoliciesResponse:
        """The last minutes as other policies would have made them; of several cells in the first one that answers. The
        door has checked the right."""
        answers = await self._cells.ask_all(lambda link: link.scheduler.compare_policies(request))
        return next(iter(answers.values()))

    async def drain(self, timeout_s: float, grace_s: float) -> None:
        """Take no new requests, and give open streams `timeout_s` to end. Those that do not end have `grace_s` to tell
        their clients so."""
        self.draining = True
        if not await self._idle_within(timeout_s):
            self._log.warning("drain_timed_out", live=len(self._running))
            await self._cells.give_up(NotServing(STOPPED))
            if not await self._idle_within(grace_s):
                self._over = True  # these streams wait for the scheduler, or for a client that does not read
                for task in set(filter(None, self._running.values())):
                    task.cancel()

    async def close(self) -> None:
        """End what was started beside this process."""
        await self._structures.close()

    async def _idle_within(self, timeout_s: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return self._idle.is_set()


def _until(deadline: float) -> float:
    return max(0.0, deadline - asyncio.get_running_loop().time())
