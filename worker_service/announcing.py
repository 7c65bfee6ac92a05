"""Tells the scheduler that this worker is coming, while it loads: the service then knows what to expect, and a worker
that it would not take hears so before it has loaded anything. Nothing is loaded here."""

import asyncio
from collections.abc import Sequence

import grpc
import structlog

from protos import version
from protos.link.v1 import worker_link_pb2 as pb
from protos.link.v1.worker_link_pb2_grpc import WorkerLinkStub
from protos.serving import channel
from protos.tls import Tls
from worker_service.model_files import ModelError

ASK_AGAIN_S = 0.5  # a scheduler that is not there, or does not lead
_ANSWER_TIMEOUT_S = 2.0  # until it has heard
_REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)


class RefusedError(ModelError):
    """The service does not take this worker: it runs another model, or speaks another version."""


def refusal(error: BaseException) -> RefusedError | None:
    """The refusal of this worker in the end of a stream; None: nothing, the connection broke or nobody leads there."""
    if isinstance(error, grpc.aio.AioRpcError):
        if error.code() in _REFUSALS:
            return RefusedError(f"the scheduler does not take this worker: {error.details()}")
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return RefusedError(version.reason(error, "worker"))
    return None


async def announce(schedulers: Sequence[str], tls: Tls, *, worker: str, model: str, fingerprint: str) -> None:
    """Until cancelled; a scheduler that is too old for it is told nothing. `schedulers`: HOST:PORT of each.
    Raises RefusedError."""
    request = pb.AnnounceRequest(
        protocol=version.CURRENT,
        min_protocol=version.LEAST,
        worker_id=worker,
        model_name=model,
        model_fingerprint=fingerprint,
    )
    telling = [asyncio.create_task(_announce(scheduler, tls, request)) for scheduler in schedulers]
    try:
        await asyncio.gather(*telling)
    finally:
        for task in telling:
            task.cancel()


async def _announce(scheduler: str, tls: Tls, request: pb.AnnounceRequest) -> None:
    log = structlog.get_logger().bind(service="worker", worker=request.worker_id)
    while True:
        async with channel(scheduler, tls.channel_credentials()) as link:
            call = WorkerLinkStub(link).Announce(request)
            try:
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    heard = await call.read()
                if heard is not grpc.aio.EOF:
                    log.info("announced", scheduler=scheduler)
                    await call.read()
            except TimeoutError:
                pass
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    await asyncio.Event().wait()
                if (refused := refusal(error)) is not None:
                    raise refused from error
            finally:
                call.cancel()
        await asyncio.sleep(ASK_AGAIN_S)
