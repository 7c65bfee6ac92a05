"""The attached workers: who may attach, what a report means, what a worker is to run next. No transport lives here.

A report is answered at once; what it brought is stored in the background (durable_core.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

import structlog

from protos.errors import BadInput, LastWorker, NotServing, UnknownWorker
from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import worker_link_pb2 as pb
from scheduler_service import checks, reports, translate
from scheduler_service.config import Settings
from scheduler_service.core import placement
from scheduler_service.core.events import CostChanged, Draining, Obeyed, StepDone, WorkerDown
from scheduler_service.durable_core import DurableCore
from scheduler_service.ledger import Ledger
from scheduler_service.outbox import Outboxes
from scheduler_service.reports import Output
from scheduler_service.session import Sessions, WorkerSession

MODEL_STAYS_S = 60.0  # where live requests wait for it, behind its last worker, which may be coming back
STEP_SLACK = 10.0  # a report may take this many times the expected round, beside the settings' step_timeout_s


class WorkerPool:
    """`outboxes`: the gateways that hear whether anybody serves."""

    def __init__(
        self, settings: Settings, durable: DurableCore, ledger: Ledger, sessions: Sessions, outboxes: Outboxes
    ) -> None:
        self.model: common_pb.ModelInfo | None = None  # the one that every worker runs, or ran last
        self.epoch = 0  # of this leader
        self.led_since = -inf  # by the clock
        self.sessions = sessions
        self.loading: list[str] = []  # names of workers that are coming
        self._to_go: set[str] = set()  # names of workers that were told to drain, and have not said that they do
        self._settings, self._durable, self._ledger, self._outboxes = settings, durable, ledger, outboxes
        self._core = durable.core
        self._log = structlog.get_logger()

    # ---- who is there ----

    def attach(self, hello: pb.Hello) -> WorkerSession:
        """A worker's new connection; an older one of the same worker is closed. Its model was checked. Raises BadInput
        if its context is smaller than that of the others, or it refuses what they serve."""
        if self.model is None or not self.sessions:
            if self.model is not None and hello.tokenizer_bytes and not hello.model.tokenizer_json:
                hello.model.tokenizer_json = self.model.tokenizer_json
            self.model = hello.model
        elif hello.model.context_tokens < self.model.context_tokens:
            raise BadInput("model", f"its context is smaller than the {self.model.context_tokens} tokens promised")
        elif less := sorted(hello.model.refused.keys() - self.model.refused.keys()):
            raise BadInput("model", f"its engine cannot serve {', '.join(less)}, which the other workers do")
        # -1 is no placement: requests that the worker still holds are admitted anew, and their tokens are truncated to
        # those that are durable.
        sent = {held.request_id: -1 for held in hello.held}
        session = WorkerSession(hello.worker_id, hello.session, sent, self._settings.report_within_ms / 1000)
        if hello.worker_id in self.sessions:  # the same worker again, or two that take each other's place for ever
            self._log.warning("worker_replaced", worker=hello.worker_id, by="another connection of the same --name")
        self.sessions.open(session)
        self._durable.apply(translate.to_worker_up(hello))
        if hello.worker_id in self._to_go:  # its link broke before it heard so
            self._tell_to_drain(session)
        self._changed()
        return session

    def has_tokenizer(self, hello: pb.Hello) -> bool:
        """Whether it is in the greeting, or a worker of that model has brought it: the fingerprint stands for it."""
        known = self.model is not None and self.model.fingerprint == hello.model.fingerprint
        return known or not hello.tokenizer_bytes

    @contextmanager
    def expecting(self, request: pb.AnnounceRequest) -> Iterator[None]:
        """A worker loads its model while the block runs. Raises RequestError if it does not belong here."""
        checks.announcement(request)
        self.check_model(request.model_name, request.model_fingerprint)
        self.loading.append(request.worker_id)
        try:
            yield
        finally:
            self.loading.remove(request.worker_id)

    @property
    def model_stays(self) -> bool:
        """Whether workers have only just gone, or this leader has only just begun."""
        return self._durable.clock() - max(self._core.fleet.staffed_at, self.led_since) < MODEL_STAYS_S

    @property
    def own_model(self) -> str:
        """The fingerprint of the model that is served, or else that live requests wait for; "": nothing is known."""
        stored = (tracked.model for tracked in self._ledger.live.values() if tracked.model)
        return self.model.fingerprint if self.model else next(stored, "")

    def check_model(self, name: str, fingerprint: str) -> None:
        """Raises BadInput if the attached workers run another model, or if live requests wait for some that have only
        just gone; NotServing if those have not come yet, and this leader has only just begun. Else it may change."""
        fleet = self._core.fleet
        waiting = fleet.entries or fleet.unseen.requests
        free = not self.sessions and not (waiting and self.model_stays)
        own = self.own_model
        if free or own in ("", fingerprint):
            return
        if self.model is None:
            raise NotServing(f"live requests wait for workers of model {own}; {name} may come in a minute")
        other = f"{name} differs from" if name != self.model.name else f"this {name} has other files or --weights than"
        raise BadInput("model", f"{other} what the other workers run: {self.model.name}")

    def drain(self, name: str, *, force: bool) -> int:
        """Have a worker end: it gets nothing new from now on. `force`: even the last one. Returns how many workers
        remain. Raises UnknownWorker, LastWorker."""
        workers = self._core.fleet.workers
        if (session := self.sessions.get(name)) is None:
            raise UnknownWorker(f"worker {name!r} is not attached; attached are {', '.join(sorted(workers)) or 'none'}")
        remaining = sum(not worker.draining for other, worker in workers.items() if other != name)
        if not remaining and not (force or workers[name].draining):
            raise LastWorker(f"{name} is the last worker: requests would wait until another one comes; force it if so")
        self._to_go.add(name)
        self._tell_to_drain(session)
        return remaining

    def _tell_to_drain(self, session: WorkerSession) -> None:
        session.told_to_drain = True
        self._drain(session.worker)

    def _drain(self, name: str) -> None:
        if not self._core.fleet.workers[name].draining:
            self._log.info("worker_draining", worker=name)
            self._durable.apply(Draining(name))
        self.sessions.wake_all()

    def detach(self, session: WorkerSession) -> None:
        """The connection has ended. Its requests continue on other workers, or here when this worker comes back."""
        if self.sessions.get(session.worker) is not session:
            return
        self.sessions.close(session)
        if session.leaving:  # for good: another one of its name is not meant
            self._to_go.discard(session.worker)
        self._durable.apply(WorkerDown(session.worker, died=not (session.leaving or session.sent_away)))
        if suspects := len(self._core.fleet.isolation.suspects):
            self._log.warning("suspects", worker=session.worker, requests=suspects)
        self._changed()

    def _changed(self) -> None:
        self.sessions.wake_all()
        self._outboxes.announce(self.served)

    @property
    def served(self) -> common_pb.ModelInfo | None:
        """The model that can be used now; None without workers."""
        return self.model if self.sessions else None

    def close_hung(self, seconds: float) -> None:
        """`seconds` have passed. Give up on workers that have owed the report of a round for too long: they still send
        heartbeats, but their device hangs."""
        for session in self.sessions.values():
            worker = self._core.fleet.workers[session.worker]
            up = worker.up
            prefill = min(up.slots * self._settings.prefill_chunk, worker.memory_tokens)  # of one round
            expected_s = up.cost.round_s(up.max_draft, up.slots) + prefill * up.cost.prefill_token_s
            limit_s = self._settings.step_timeout_s + STEP_SLACK * expected_s
            if session.wait(seconds, self._settings.max_lag) >= limit_s and not session.closed.is_set():
                self._log.error("worker_hung", worker=session.worker, after_s=round(session.owed_s, 1))
                session.close()

    # ---- what they say ----

    def report(self, session: WorkerSession, report: pb.StepReport, received_at: float) -> None:
        """Take in a report, and have the next command sent. `received_at`: time.perf_counter(). Raises BadInput, and
        then nothing has changed."""
        if (report.session, report.epoch) != (session.id, self.epoch) or session.closed.is_set():
            return
        if report.HasField("cost"):
            checks.cost(report.cost)
        step, outputs = reports.read(session.worker, report)
        if report.draining:
            self._to_go.discard(session.worker)
            if not self._core.fleet.workers[session.worker].draining:
                self._drain(session.worker)
        if outputs:
            self._step_done(session, report, step, outputs, received_at)
        else:
            self._report_without_rows(session, report)

    def _step_done(
        self,
        session: WorkerSession,
        report: pb.StepReport,
        step: StepDone,
        outputs: dict[str, Output],
        received_at: float,
    ) -> None:
        ended = session.count(report, step)
        if report.HasField("cost"):
            self._durable.observe(CostChanged(session.worker, translate.to_cost(report.cost)))
        if self._urgent(session, outputs, ended):
            session.reported_at = received_at
            session.wake.set()
        else:
            session.wake_in_time()
        self._durable.step_done(step, outputs)

    def _urgent(self, session: WorkerSession, outputs: dict[str, Output], ended: int) -> bool:
        """Whether the report needs its command at once: without one the worker would soon stand still or run vacant
        slots beside waiting requests, or somebody waits there for memory or, as a suspect, for an empty worker.

        A worker leaves at most a quarter of `max_lag` unreported. Answered at half, it never waits for a command."""
        lag, fleet = session.seen_step - session.command.seen_step, self._core.fleet
        return bool(
            not session.report_within_s
            or session.stuck
            or lag >= self._settings.max_lag // 2
            or fleet.isolation.suspects
            or (session.spares <= ended and fleet.crowded)  # as many may end in the next round
            or any(row.skipped == pb.SKIP_NO_BLOCKS for _, _, row in outputs.values())
        )

    def _report_without_rows(self, session: WorkerSession, report: pb.StepReport) -> None:
        """Either a heartbeat (free_blocks is 0) or the worker's answer to a command that lists no request. The answer
        says how much KV is free after cancellations, if any. If suspects wait for this worker to be empty, they may
        start; and requests that have outgrown it no longer run here, so they may go to another worker."""
        fleet = self._core.fleet
        worker, nobody = fleet.workers[session.worker], not session.command.schedule
        quarantined = nobody and fleet.isolation.quarantined(worker)
        stopped = nobody and worker.listed and report.command_seq == session.seq and placement.outgrown(fleet, worker)
        if quarantined or stopped or report.free_blocks:
            self._durable.observe(Obeyed(session.worker, report.command_seq, report.free_blocks or None))
        if quarantined or stopped:
            session.wake.set()

    # ---- what they are told ----

    def call_for(self, id: str) -> None:
        """A request has come: wake the worker that should plan because of it, if any should."""
        if (worker := placement.called_for(self._core.fleet, id)) is not None:
            session = self.sessions[worker]
            (session.wake_in_time if session.spares > 0 else session.wake.set)()

    def command(self, session: WorkerSession) -> pb.StepCommand:
        """The newest desired state of that worker. It has to be sent: it counts as known to the worker."""
        plan = self._durable.plan(session.worker)
        if (idle := placement.idle_beside_work(self._core.fleet)) is not None and idle != session.worker:
            self.sessions[idle].wake.set()  # nothing else would wake it: an idle worker reports nothing
        forget = self.sessions.forget(session, plan.to_forget)
        admitted = [(run.id, run.placement) for run in plan.schedule if session.sent.get(run.id) != run.placement]
        self.sessions.sent(session, admitted)
        session.seq += 1
        command = pb.StepCommand(
            epoch=self.epoch,
            session=session.id,
            seq=session.seq,
            seen_step=session.seen_step,
            admit=[self._admit(id, placement) for id, placement in admitted],
            drop=plan.drop,
            offload=plan.offload,
            forget=forget,
            report_within_s=session.report_within_s,
        )
        translate.list_runs(plan, command)
        session.commanded(command, self._core.fleet.workers[session.worker].up.slots)
        return command

    def _admit(self, id: str, placement: int) -> pb.Admit:
        tracked = self._ledger.live[id]
        submit = tracked.submit
        admit = pb.Admit(
            request_id=id,
            placement=placement,
            tokens=submit.prompt,
            prompt_len=len(submit.prompt),
            sampling=submit.sampling,
            limits=submit.limits,
            tenant=submit.tenant,
            traceparent=submit.traceparent,
            local_drafts=self._core.fleet.tenants.terms_of(submit.tenant).local_drafts,
        )
        admit.tokens.extend(tracked.output)
        return admit
