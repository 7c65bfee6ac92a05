"""Clients of the public API: they submit, wait, hang up, come back and cancel, and compare all that they are told."""

import asyncio
import random
from collections.abc import Sequence
from itertools import cycle, islice

import grpc

from protos.errors import REQUEST_ID_KEY, RETRY_AFTER_KEY
from protos.v1 import inference_pb2 as pb
from protos.v1 import inference_pb2_grpc, types_pb2
from scheduler_service.config import Settings
from tests.scheduler.faults.ends import Channel
from tests.scheduler.faults.model import answer
from tests.scheduler.faults.promise import Promise
from tests.scheduler.faults.schedule import Job

CODE = grpc.StatusCode
PAUSE_S = 0.15
MAX_DEATHS: int = Settings.model_fields["max_deaths"].default


class Client:
    """One stream of one job, however often it has to be taken up again. `outcome` is how it ended."""

    def __init__(self, job: Job, channels: Sequence[Channel], promise: Promise, rng: random.Random) -> None:
        self.job, self.outcome = job, ""
        self._promise, self._rng = promise, rng
        start = job.gateway % len(channels)
        self._channels = cycle(islice(cycle(channels), start, start + len(channels)))
        self._stub = inference_pb2_grpc.InferenceStub(next(self._channels))
        self._whole = answer(job.prompt, job.max_tokens)
        self._received = 0
        self._accepted = False
        self._broke = False  # its connection did, or it hung up: then its gateway may have cancelled the request
        self._cancelling: asyncio.Task[None] | None = None

    async def run(self) -> None:
        job = self.job
        await asyncio.sleep(job.at_s)
        while not self.outcome:
            try:
                await self._stream()
            except grpc.aio.AioRpcError as error:
                self.outcome = self._judge(error)
                if not self.outcome:
                    retry_s = _retry_after_s(error)
                    await asyncio.sleep(max(PAUSE_S * self._rng.uniform(0.5, 1.5), min(retry_s, 1.0)))
                    self._stub = inference_pb2_grpc.InferenceStub(next(self._channels))

    async def _stream(self) -> None:
        job, timeout_s = self.job, None
        if job.manner == "deadline":
            timeout_s = 0.1 + 0.02 * job.after
        if self._accepted:
            offset = self._received
            if job.manner == "leaves and resumes":
                offset = self._rng.randint(0, offset)
            call = self._stub.Resume(pb.ResumeRequest(request_id=job.id, offset=offset), timeout=timeout_s)
        else:
            offset = 0
            call = self._stub.Generate(self._request(), timeout=timeout_s)
        text = ""
        told = asyncio.ensure_future(call.initial_metadata())
        told.add_done_callback(self._told)
        try:
            if self._leaves(offset):
                await asyncio.sleep(self._rng.random() * 0.1)  # or it hangs up before anything came
                return
            async for chunk in call:
                self._taken(chunk, offset)
                if self.outcome:
                    return
                offset += len(chunk.token_ids)
                text += chunk.text
                if chunk.HasField("final"):
                    self._ended(chunk.final, text, offset)
                    return
                if self._leaves(offset):
                    return
            self._promise.violated(f"a stream of {job.id} ended well and without its last chunk")
            self.outcome = "broken off"
        finally:
            told.cancel()
            call.cancel()

    def _told(self, told: "asyncio.Future[tuple[tuple[str, str], ...]]") -> None:
        if not told.cancelled() and not told.exception() and dict(told.result()).get(REQUEST_ID_KEY) == self.job.id:
            self._promise.accepted(self.job.id)
            self._accepted = True

    def _request(self) -> pb.GenerateRequest:
        job = self.job
        detach = types_pb2.ON_DISCONNECT_DETACH if job.detached else types_pb2.ON_DISCONNECT_CANCEL
        kind = types_pb2.PRIORITY_INTERACTIVE if job.urgent else types_pb2.PRIORITY_DEFAULT
        return pb.GenerateRequest(
            request_id=job.id,
            prompt=" ".join(map(str, job.prompt)),
            max_tokens=job.max_tokens,
            on_disconnect=detach,
            priority=kind,
        )

    def _leaves(self, at: int) -> bool:
        """Whether it does now what its manner says."""
        job = self.job
        if self._broke or at < job.after:
            return False
        if job.manner == "cancels" and self._cancelling is None:
            self._cancelling = asyncio.create_task(self._cancel())
        if job.manner not in ("hangs up", "leaves and resumes"):
            return False
        self._broke = True
        return True

    async def _cancel(self) -> None:
        for _ in range(20):
            try:
                await self._stub.Cancel(pb.CancelRequest(request_id=self.job.id), timeout=2.0)
                return
            except grpc.aio.AioRpcError as error:
                if error.code() not in (CODE.UNAVAILABLE, CODE.NOT_FOUND, CODE.DEADLINE_EXCEEDED):
                    self._promise.violated(f"cancelling {self.job.id}: {error.code()} {error.details()}")
            await asyncio.sleep(PAUSE_S)

    def _taken(self, chunk: pb.GenerateResponse, offset: int) -> None:
        job, end = self.job, offset + len(chunk.token_ids)
        self._accepted = True
        if chunk.request_id != job.id or chunk.offset != offset:
            self._promise.violated(f"{job.id} at {offset} was sent {chunk.request_id} at {chunk.offset}")
        if list(chunk.token_ids) != self._whole[offset:end] and job.manner == "conflict" and self._promise.excused:
            self.outcome = "lost"  # and then another took its id
        elif list(chunk.token_ids) != self._whole[offset:end]:
            self._promise.violated(f"{job.id} was sent {list(chunk.token_ids)} at {offset}")
        self._promise.delivered(job.id, end)
        self._received = max(self._received, end)

    def _ended(self, final: pb.Final, text: str, offset: int) -> None:
        job, name = self.job, types_pb2.FinishReason.Name(final.finish_reason)
        self.outcome = name.removeprefix("FINISH_REASON_").lower()
        self._promise.ended(job.id, final.finish_reason)
        if self.outcome in ("stop", "length"):
            if offset != len(self._whole):
                self._promise.violated(f"{job.id} ended after {offset} of {len(self._whole)} tokens")
        elif self.outcome != "cancelled" or job.detached:
            self._promise.violated(f"{job.id} ended as {self.outcome}, which nobody wished")
        elif not (self._broke or self._cancelling or job.manner in ("twice", "conflict")):
            self._promise.violated(f"{job.id} was cancelled, and nobody wished it")
        if final.usage.completion_tokens != offset:
            self._promise.violated(f"{job.id}: {final.usage.completion_tokens} tokens counted, {offset} sent")
        if not "".join(f"{token} " for token in self._whole[:offset]).endswith(text):
            self._promise.violated(f"{job.id}: {text!r} is not its tokens' text")

    def _judge(self, error: grpc.aio.AioRpcError) -> str:
        """An error that says whether to retry; "": it does."""
        job, code = self.job, error.code()
        if code is CODE.UNAVAILABLE or (code is CODE.RESOURCE_EXHAUSTED and _retry_after_s(error)):
            self._broke = True
            return ""
        if code is CODE.DEADLINE_EXCEEDED and job.manner == "deadline":
            return "deadline"
        if code is CODE.ALREADY_EXISTS and job.manner == "conflict" and not self._received:
            return "conflict"
        if code in (CODE.DATA_LOSS, CODE.OUT_OF_RANGE, CODE.NOT_FOUND) and self._promise.excused:
            return "lost"
        if (
            code is CODE.INTERNAL
            and "do not send it again" in error.details()
            and self._promise.worker_losses >= MAX_DEATHS
        ):
            return "isolated"  # by chance it was alone on each of them
        self._promise.violated(f"a client of {job.id} at {self._received} was told {code}: {error.details()}")
        return "failed"


def _retry_after_s(error: grpc.aio.AioRpcError) -> float:
    trailers = {str(key): str(value) for key, value in error.trailing_metadata() or ()}
    return int(trailers.get(RETRY_AFTER_KEY, 0)) / 1000
