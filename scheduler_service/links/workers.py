"""The streams of workers: one for each. What a worker runs is decided elsewhere."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog

from protos import version
from protos.errors import BadInput, NotServing, RequestError
from protos.link.v1 import worker_link_pb2 as pb
from protos.link.v1 import worker_link_pb2_grpc as rpc
from protos.models import PART_BYTES
from protos.serving import BEAT_S, Stream, abort, first_of
from scheduler_service import checks
from scheduler_service.leader import Leader
from scheduler_service.pace import Lane, of_command
from scheduler_service.session import WorkerSession

HELLO_TIMEOUT_S = 10.0
PART_TIMEOUT_S = 2.0  # until the next part of a tokenizer


class WorkerLink(rpc.WorkerLinkServicer):
    def __init__(self, leads: Callable[[], Leader]) -> None:
        """`leads` returns the leader, or raises NotServing if nobody leads in this process."""
        self._leads = leads
        self._log = structlog.get_logger()

    async def Attach(self, requests: Any, context: Any) -> None:  # type: ignore[override] # noqa: N802
        try:
            hello = await self._hello(context)  # before any refusal: a worker whose write fails is not told the reason
            await asyncio.sleep(0)  # an older worker's has megabytes, and reading them has taken a turn
            leader = self._leads()
            links_ended = leader.links_ended
            session = await leader.attach(hello, partial(_tokenizer, hello.tokenizer_bytes, context))
            session.sent_away = links_ended.is_set()  # while it attached: the store may have kept it waiting
        except RequestError as error:
            self._told_refused(error)
            await abort(context, error)
            return
        log = self._log.bind(worker=session.worker)
        log.info("worker_attached", slots=hello.slots, blocks=hello.blocks, held=len(hello.held))
        try:
            protocol = min(hello.protocol, version.CURRENT)
            welcome = pb.Welcome(epoch=leader.epoch, max_lag=leader.settings.max_lag, protocol=protocol)
            await context.write(pb.ToWorker(welcome=welcome))
            await first_of(
                lambda: _read(leader, session, context),
                lambda: _write(leader, session, context),
                session.closed.wait,
                leader.over.wait,
                links_ended.wait,
            )
        except TimeoutError:
            log.warning("worker_silent", timeout_s=leader.settings.worker_timeout_s)
        except RequestError as error:
            log.error("worker_cut_off", reason=error.message)
            await abort(context, error)
        finally:
            log.info("worker_detached")
            leader.workers.detach(session)

    async def Announce(self, request: pb.AnnounceRequest, context: Any) -> None:  # type: ignore[override] # noqa: N802
        try:
            leader = self._leads()
            with leader.workers.expecting(request):
                self._log.info("worker_loading", worker=request.worker_id)
                await context.write(pb.Announced())
                await leader.over.wait()  # the worker ends the call before that, when it has loaded
        except RequestError as error:
            self._told_refused(error, worker=request.worker_id)
            await abort(context, error)

    def _told_refused(self, error: RequestError, **which: str) -> None:
        """A worker asks a scheduler that stands by, or cannot answer yet, several times a second."""
        tell = self._log.debug if isinstance(error, NotServing) else self._log.warning
        tell("worker_refused", reason=error.message, **which)

    async def _hello(self, stream: Stream[pb.FromWorker, pb.ToWorker]) -> pb.Hello:
        """The first message. Raises BadInput if it is not a Hello that we understand, or does not come in time."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                message = await stream.read()
        except TimeoutError:
            raise BadInput("hello", f"none came within {HELLO_TIMEOUT_S:.0f} s") from None
        if not isinstance(message, pb.FromWorker) or not message.HasField("hello"):
            raise BadInput("hello", "must be the first message")
        checks.hello(message.hello)
        return message.hello


async def _tokenizer(size: int, stream: Stream[pb.FromWorker, pb.ToWorker]) -> bytes:
    """The `size` bytes of the tokenizer that a worker has left out of its greeting. Raises BadInput if the worker sends
    anything else, nothing for PART_TIMEOUT_S, or less in the mean than PART_BYTES in that time. Meanwhile no other
    worker can attach."""
    parts: list[bytes] = []
    try:
        async with asyncio.timeout(PART_TIMEOUT_S * (2 + size / PART_BYTES)):
            async with asyncio.timeout(PART_TIMEOUT_S):
                await stream.write(pb.ToWorker(describe=pb.Describe()))
            while size:
                async with asyncio.timeout(PART_TIMEOUT_S):
                    message = await stream.read()
                part = message.tokenizer_part if isinstance(message, pb.FromWorker) else b""
                if not 0 < len(part) <= size:
                    raise BadInput("tokenizer_part", f"of {len(part)} bytes, where {size} are to come")
                parts.append(part)
                size -= len(part)
    except TimeoutError:
        raise BadInput("tokenizer_part", f"too slow: {size} bytes are still to come") from None
    return b"".join(parts)


async def _read(leader: Leader, session: WorkerSession, stream: Stream[pb.FromWorker, pb.ToWorker]) -> None:
    while True:
        async with asyncio.timeout(leader.settings.worker_timeout_s):
            message = await stream.read()
        if not isinstance(message, pb.FromWorker):
            return  # it hung up without a goodbye: it may have died
        received_at = time.perf_counter()
        await leader.turns.room(len(message.report.rows), Lane.REPORTS)
        leader.workers.report(session, message.report, received_at)
        if message.report.leaving:
            session.leaving = True
            return


async def _write(leader: Leader, session: WorkerSession, stream: Stream[pb.FromWorker, pb.ToWorker]) -> None:
    """Send commands. A plan is made when it can be sent, so that several events make one command."""
    while True:
        try:
            async with asyncio.timeout(BEAT_S):
                await session.wake.wait()
                await leader.persister.room(session.worker)
                await leader.turns.room(of_command(len(session.command.schedule)), Lane.COMMANDS)
        except TimeoutError:
            await stream.write(pb.ToWorker())
            continue
        if session.told_to_drain:
            session.told_to_drain = False
            await stream.write(pb.ToWorker(drain=pb.Drain()))
        if session.closed.is_set():  # from here to the command nothing may wait: no plan is made for a closed session
            return
        session.wake.clear()
        command = leader.workers.command(session)
        reported_at, session.reported_at = session.reported_at, None
        if reported_at is not None:
            leader.counters.commanded(time.perf_counter() - reported_at)
        await stream.write(pb.ToWorker(command=command))
