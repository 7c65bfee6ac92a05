"""The workers' end of the scheduler: streams and sessions. What to run is decided elsewhere."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog

from protos import version
from protos.errors import BadInput, RequestError
from protos.serving import BEAT_S, Stream, abort, first_of
from protos.v1 import worker_link_pb2 as pb
from protos.v1 import worker_link_pb2_grpc as rpc
from scheduler_service import checks

if TYPE_CHECKING:
    from scheduler_service.leader import Leader

HELLO_TIMEOUT_S = 10.0


@dataclass(slots=True, eq=False)
class WorkerSession:
    """One connection of one worker."""

    worker: str
    id: str
    sent: dict[str, int]  # placement under which each request that it knows was admitted
    seq: int = 0
    seen_step: int = 0
    command: pb.StepCommand = field(default_factory=pb.StepCommand)  # the last one
    stuck: bool = False  # its last round got nowhere: it waits for a command that changes something
    owed_s: float = 0.0  # for so long it owes a round
    left: bool = False  # it has said that it leaves: it did not die
    reported_at: float | None = None  # of the report that the next command answers
    wake: asyncio.Event = field(default_factory=asyncio.Event)  # a command is due
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    rounds: int = 0
    forward_us: int = 0  # drafting and verifying
    other_us: int = 0
    idle_us: int = 0
    tokens: int = 0  # of output

    def close(self) -> None:
        self.closed.set()

    def commanded(self, command: pb.StepCommand) -> None:
        edited = command.admit or command.forget or command.drop or command.offload
        if self.stuck and (edited or command.rank != self.command.rank):
            self.stuck = False
        self.command = command

    def wait(self, seconds: float, max_lag: int) -> float:
        """They passed. For how long it owes the report of a round by now: it was told whom to run, and may."""
        owes = self.command.rank and not self.stuck and self.seen_step - self.command.seen_step < max_lag
        self.owed_s = self.owed_s + seconds if owes else 0.0
        return self.owed_s

    def count(self, report: pb.StepReport) -> None:
        self.seen_step = report.step
        self.stuck = all(row.skipped for row in report.rows)
        self.owed_s = 0.0
        self.rounds += 1
        self.forward_us += report.draft_us + report.verify_us
        self.other_us += report.other_us
        self.idle_us += report.idle_us
        self.tokens += sum(len(row.tokens) for row in report.rows)

    @property
    def idle_share(self) -> float:
        return self._share(self.idle_us)

    @property
    def outside_forward_share(self) -> float:
        return self._share(self.idle_us + self.other_us)

    def _share(self, part_us: int) -> float:
        return part_us / max(1, self.forward_us + self.other_us + self.idle_us)


class WorkerLink(rpc.WorkerLinkServicer):
    def __init__(self, leads: Callable[[], "Leader"]) -> None:
        """`leads`: who does; raises NotServing while nobody does here."""
        self._leads = leads
        self._log = structlog.get_logger()

    async def Attach(self, requests: Any, context: Any) -> None:  # type: ignore[override] # noqa: N802
        try:
            leader = self._leads()
            hello = await self._hello(context)
            session = await leader.attach(hello)
        except RequestError as error:
            self._log.warning("worker_refused", reason=error.message)
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
            )
        except TimeoutError:
            log.warning("worker_silent", timeout_s=leader.settings.worker_timeout_s)
        except RequestError as error:
            log.error("worker_cut_off", reason=error.message)
            await abort(context, error)
        finally:
            log.info("worker_detached")
            leader.detach(session)

    async def _hello(self, stream: Stream[pb.FromWorker, pb.ToWorker]) -> pb.Hello:
        """Its first message. Raises BadInput if that is not a Hello that we understand."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                message = await stream.read()
        except TimeoutError:
            raise BadInput("hello", f"none came within {HELLO_TIMEOUT_S:.0f} s") from None
        if not isinstance(message, pb.FromWorker) or not message.HasField("hello"):
            raise BadInput("hello", "must be the first message")
        checks.hello(message.hello)
        return message.hello


async def _read(leader: "Leader", session: WorkerSession, stream: Stream[pb.FromWorker, pb.ToWorker]) -> None:
    while True:
        async with asyncio.timeout(leader.settings.worker_timeout_s):
            message = await stream.read()
        if not isinstance(message, pb.FromWorker):
            return  # it hung up, and may well have died
        checks.report(message.report)
        leader.report(session, message.report, time.perf_counter())
        if message.report.leaving:
            session.left = True
            return


async def _write(leader: "Leader", session: WorkerSession, stream: Stream[pb.FromWorker, pb.ToWorker]) -> None:
    """Desired state: planned when it can be sent, so that several events make one command."""
    while True:
        try:
            async with asyncio.timeout(BEAT_S):
                await session.wake.wait()
                await leader.persister.room()
        except TimeoutError:
            await stream.write(pb.ToWorker())
            continue
        if session.closed.is_set():
            return
        session.wake.clear()
        command = leader.command(session)
        reported_at, session.reported_at = session.reported_at, None
        if reported_at is not None:
            leader.insight.command_delays_s.append(time.perf_counter() - reported_at)
        await stream.write(pb.ToWorker(command=command))
