"""The worker's stream to the scheduler: sessions, epochs, heartbeats, reconnects. The model runs in runner.py."""

import asyncio
import uuid
from asyncio import FIRST_COMPLETED
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias

import grpc
import structlog

from protos import version
from protos.link.v1 import worker_link_pb2 as pb
from protos.link.v1.worker_link_pb2_grpc import WorkerLinkStub
from protos.models import parts
from protos.outage import Outage
from protos.serving import DIAL_S, channel, dialled, first_of
from protos.silence import Silence
from protos.tls import Tls
from worker_service.announcing import refusal
from worker_service.engine.types import Held
from worker_service.reporting import Report
from worker_service.runner import Runner, TooManyCommandsError
from worker_service.stays import Stays
from worker_service.wire import of_cost, of_held, of_report, to_command

HEARTBEAT_S = 1.0
_HELLO_TIMEOUT_S = 10.0  # until the scheduler welcomes
_WRITE_TIMEOUT_S = 30.0  # a stream that takes nothing for so long is broken
_CLOSE_TIMEOUT_S = 1.0
RECONNECT_S = 0.1  # the first wait; it doubles up to the next
MAX_RECONNECT_S = 0.3


class LinkError(Exception):
    """This connection is over; another one may work."""


# What a broken, refused or silent stream raises. A write after a stream's end raises InvalidStateError.
_CONNECTION_ERRORS = (grpc.aio.AioRpcError, LinkError, TooManyCommandsError, TimeoutError, asyncio.InvalidStateError)
_Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.FromWorker, pb.ToWorker]"


class Link:
    """Keeps an Attach stream to the leading scheduler open; each new stream is a new session."""

    def __init__(
        self,
        schedulers: Sequence[str],
        *,
        tls: Tls,
        runner: Runner,
        hello: pb.Hello,
        on_attached: Callable[[bool], Awaitable[None]],
        stays: Stays | None = None,
        on_drain: Callable[[], object] = lambda: None,
        leave_if_refused: bool = False,
    ) -> None:
        """`schedulers`: HOST:PORT of each; one of them leads. `runner` must be warmed. `hello`: the worker's id, model
        and sizes; what differs from session to session is filled in here. `on_attached` is told True at every welcome,
        and False when that session has ended. `stays` is told of every command and report; None: nobody is. `on_drain`
        is called when the scheduler has been told to let this worker go. `leave_if_refused`: `run` raises RefusedError
        where a scheduler says that this worker does not belong there."""
        self._schedulers, self._tls = tuple(schedulers), tls
        self._runner = runner
        self._on_attached = on_attached
        self._tokenizer = hello.model.tokenizer_json
        self._hello = pb.Hello()  # without the tokenizer
        self._hello.CopyFrom(hello)
        self._hello.model.ClearField("tokenizer_json")
        # Whether the greeting leaves the tokenizer out: the scheduler is believed to be of a version that asks for it.
        self._leaves_out = bool(self._tokenizer)
        self._stays = stays or Stays(None, hello.worker_id)
        self._on_drain, self._leave_if_refused = on_drain, leave_if_refused
        self._last = ""  # the scheduler of the last session
        self._max_epoch = 0  # of the highest leader ever obeyed
        self._reports: asyncio.Queue[pb.StepReport] | None = None  # of the session, while there is one
        self._draining = False
        self._drained, self._over = asyncio.Event(), asyncio.Event()
        self._log = structlog.get_logger().bind(service="worker", worker=hello.worker_id)

    async def run(self) -> None:
        """Attach, again and again, until cancelled or drained. Raises RefusedError."""
        wait_s, outage = 0.0, Outage()
        while not self._draining:
            try:
                await self._attach_to_any()
            except _CONNECTION_ERRORS as error:
                log = self._log.warning if outage.is_new(_brief(error)) else self._log.debug
                log("not_attached", schedulers=list(self._schedulers), error=_brief(error))
                wait_s = min(2 * wait_s or RECONNECT_S, MAX_RECONNECT_S)
                await asyncio.sleep(wait_s)
            else:
                wait_s = 0.0
                outage.over()
                await asyncio.sleep(RECONNECT_S)  # one that welcomes and hangs up must not be called in a tight loop

    async def drain(self, timeout_s: float) -> None:
        """Take on no more requests, let those that run here end within `timeout_s` seconds, then say goodbye."""
        self._draining = True
        if (reports := self._reports) is None:
            return
        reports.put_nowait(pb.StepReport())  # so that the scheduler knows at once
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._drained.wait()
        await asyncio.wrap_future(self._runner.detach())
        reports.put_nowait(pb.StepReport(leaving=True))
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._over.wait()  # the scheduler has heard it and hung up

    async def _attach_to_any(self) -> None:
        """One session, until it breaks, with the first scheduler that welcomes us. All are dialled at once, so that one
        whose machine is gone keeps us from no other. Raises one of _CONNECTION_ERRORS if none welcomes us,
        RefusedError."""
        credentials = self._tls.channel_credentials()
        links = {scheduler: channel(scheduler, credentials) for scheduler in self._schedulers}
        dials = {asyncio.create_task(self._dialled(scheduler, links)): scheduler for scheduler in links}
        error: BaseException = LinkError("no port answers")
        try:
            waiting, patience_s = set(dials), DIAL_S + RECONNECT_S
            while waiting:
                done, waiting = await asyncio.wait(waiting, timeout=patience_s, return_when=FIRST_COMPLETED)
                if not done:
                    break
                for dial in done:
                    try:
                        dial.result()
                        self._last = dials[dial]
                        link = links[self._last]
                        return await self._attach(link, [other for other in links.values() if other is not link])
                    except _CONNECTION_ERRORS as failed:
                        error = failed
                        if self._leave_if_refused and (refused := refusal(failed)) is not None:
                            raise refused from failed
                patience_s = MAX_RECONNECT_S  # one has answered: the others are there by then, or asked the next time
        finally:
            for dial in dials:
                dial.cancel()
            await asyncio.gather(*dials, return_exceptions=True)
            await asyncio.gather(*(link.close() for link in links.values()))
        raise error

    async def _dialled(self, scheduler: str, links: Mapping[str, grpc.aio.Channel]) -> None:
        """As serving.dialled. The scheduler of the last session is dialled a little later: another may lead by now."""
        if len(links) > 1 and scheduler == self._last:
            await asyncio.sleep(RECONNECT_S)
        await dialled(links[scheduler])

    async def _attach(self, link: grpc.aio.Channel, others: Sequence[grpc.aio.Channel]) -> None:
        """One session over this connection, as _attach_to_any; the `others` are closed once it is welcome."""
        held = await asyncio.wrap_future(self._runner.detach())
        session = uuid.uuid4().hex
        call: _Call = WorkerLinkStub(link).Attach()
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                welcome = await self._greet(call, self._hello_of(session, held))
            await asyncio.gather(*(other.close() for other in others))
            await self._converse(call, session, welcome)
        finally:
            call.cancel()

    def _hello_of(self, session: str, held: list[Held]) -> pb.Hello:
        hello = pb.Hello(
            protocol=version.CURRENT, min_protocol=version.LEAST, session=session, max_epoch=self._max_epoch
        )
        hello.MergeFrom(self._hello)
        hello.cost.CopyFrom(of_cost(self._runner.cost))
        hello.held.extend(map(of_held, held))
        if self._leaves_out:
            hello.tokenizer_bytes, hello.min_protocol = len(self._tokenizer), version.TOKENIZER_ASKED_FOR
        else:
            hello.model.tokenizer_json = self._tokenizer
        return hello

    async def _greet(self, call: _Call, hello: pb.Hello) -> pb.Welcome:
        try:
            await call.write(pb.FromWorker(hello=hello))
            answer = await call.read()
            if isinstance(answer, pb.ToWorker) and answer.HasField("describe"):
                for part in parts(self._tokenizer):
                    await call.write(pb.FromWorker(tokenizer_part=part))
                answer = await call.read()
        except grpc.aio.AioRpcError as error:
            if self._leaves_out and error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                self._leaves_out = False
                raise LinkError("the scheduler may be older: the next greeting has the tokenizer in it") from error
            raise
        if not isinstance(answer, pb.ToWorker):
            raise LinkError(f"refused: {await call.code()} {await call.details()}")
        if not answer.HasField("welcome"):
            raise LinkError("the scheduler does not welcome this worker")
        if answer.welcome.epoch < self._max_epoch:
            raise LinkError(f"a leader of epoch {answer.welcome.epoch}, after one of {self._max_epoch}")
        self._max_epoch = answer.welcome.epoch
        self._leaves_out = bool(self._tokenizer) and answer.welcome.protocol >= version.TOKENIZER_ASKED_FOR
        return answer.welcome

    async def _converse(self, call: _Call, session: str, welcome: pb.Welcome) -> None:
        """Commands down, reports up, until the stream breaks. Then the model stops, but requests and their KV stay."""
        loop = asyncio.get_running_loop()
        # The queue is bounded by `max_lag`: the model waits for a command that has seen its reports.
        self._over.clear()
        reports = self._reports = asyncio.Queue[pb.StepReport]()

        def report(done: Report) -> None:
            loop.call_soon_threadsafe(reports.put_nowait, of_report(done, welcome.epoch, session))

        self._runner.attach(welcome.max_lag, report)
        self._log.info("attached", session=session, epoch=welcome.epoch)
        await self._on_attached(True)
        try:
            silence = Silence()
            await first_of(
                lambda: self._read(call, session, silence),
                lambda: self._write(call, session, welcome.epoch, reports),
                silence.lasts,
            )
        except _CONNECTION_ERRORS as error:
            self._log.warning("link_broken", error=_brief(error))
        finally:
            self._reports = None
            await asyncio.wrap_future(self._runner.detach())
            self._stays.detached()
            await self._on_attached(False)
            with suppress(*_CONNECTION_ERRORS):
                await self._close(call, reports)
            self._over.set()
            self._log.info("detached", session=session)

    async def _read(self, call: _Call, session: str, silence: Silence) -> None:
        """Until the scheduler hangs up."""
        while isinstance(message := await silence.read(call), pb.ToWorker):
            if message.HasField("drain"):
                self._on_drain()
            if not message.HasField("command"):
                continue  # a heartbeat
            command = message.command
            if command.session != session or command.epoch < self._max_epoch:
                self._log.warning("command_refused", epoch=command.epoch, session=command.session)
                continue
            self._max_epoch = command.epoch
            self._stays.commanded(command)
            self._runner.post(to_command(command))

    async def _write(self, call: _Call, session: str, epoch: int, reports: asyncio.Queue[pb.StepReport]) -> None:
        last = pb.StepReport()
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    report = await reports.get()
            except TimeoutError:
                report = pb.StepReport()
            if report.session:
                last = report
                self._stays.reported(report)
                if self._draining and not report.rows:
                    self._drained.set()  # the newest command lists nobody
            else:
                report.epoch, report.session = epoch, session
                report.step, report.command_seq = last.step, last.command_seq
            report.draining = self._draining
            async with asyncio.timeout(_WRITE_TIMEOUT_S):
                await call.write(pb.FromWorker(report=report))

    async def _close(self, call: _Call, reports: asyncio.Queue[pb.StepReport]) -> None:
        """Send the reports that are left, if the stream still takes them."""
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            while not reports.empty():
                await call.write(pb.FromWorker(report=reports.get_nowait()))
            await call.done_writing()
            await call.code()


def _brief(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return version.reason(error, "worker")
    return f"{type(error).__name__}: {error}"
