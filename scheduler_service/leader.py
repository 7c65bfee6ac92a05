"""The live shell around the core: observe, plan, send. One event loop owns all of its state.

A report is answered at once; what it brought is written in the background (persister.py), and relayed once it is
durable (ledger.py). No transport lives here: workers.py and gateways.py hold the streams.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import structlog

from protos.errors import BadInput, DeadlinePassed, DuplicateRequest, NotServing, QueueFull, RequestError
from protos.idempotence import content
from protos.serving import first_of
from protos.v1 import gateway_link_pb2 as gateway_pb
from protos.v1 import worker_link_pb2 as worker_pb
from protos.watched import Watched
from scheduler_service import checks, translate
from scheduler_service.config import Settings
from scheduler_service.core import admission, placement
from scheduler_service.core.core import Core
from scheduler_service.core.lifecycle import State
from scheduler_service.core.types import (
    Cancelled,
    CostChanged,
    Draining,
    Effect,
    Ended,
    Event,
    Obeyed,
    QueueIsFull,
    Submitted,
    Tick,
    TooLate,
    Unseen,
    WorkerDown,
)
from scheduler_service.event_log import EventLog
from scheduler_service.gateways import GatewayOutbox
from scheduler_service.insight import Insight
from scheduler_service.learning import Learning
from scheduler_service.ledger import Ledger, Tracked
from scheduler_service.persister import Persister
from scheduler_service.recall import Recall
from scheduler_service.retries import Retries
from scheduler_service.standby import Outranked
from scheduler_service.store import Pulse, Store, Stored, StoreUnavailable, Write
from scheduler_service.store.rounds import encode
from scheduler_service.tenants import read_terms
from scheduler_service.workers import WorkerSession

TICK_S = 0.1
STEP_SLACK = 10.0  # times what a round may cost, beside the settings' step_timeout_s
MAX_BEHIND = 1024  # batches on their way to the store; then nothing more is admitted


class Leader:
    def __init__(self, settings: Settings, store: Store, clock: Callable[[], float] = time.time) -> None:
        self.settings = settings
        self.core = Core(
            settings.make_policy(),
            draft_len=None if settings.draft_len == "auto" else settings.draft_len,
            prefill_chunk=settings.prefill_chunk,
            max_deaths=settings.max_deaths,
            bounds=settings.bounds,
        )
        self.over = asyncio.Event()  # it leads no more: all of its streams end
        self.epoch = 0
        self._obeyed = 0  # the highest epoch that a worker has told of
        self.model: gateway_pb.ModelInfo | None = None
        self.sessions: dict[str, WorkerSession] = {}
        self.outboxes: set[GatewayOutbox] = set()
        self.insight = Insight()
        self.store = store
        self.clock = clock
        self.learning = Learning(settings.predictor, self.core, store)
        self.ledger = Ledger(store, clock, self._forget)
        self.recall = Recall(store, self._read, self.ledger.live.__contains__)
        self._terms = Watched([settings.tenants], partial(read_terms, settings.tenants)) if settings.tenants else None
        self._event_log = EventLog(settings.event_log) if settings.event_log else None
        self._retries = Retries()
        self._log = structlog.get_logger()

    async def lead(self, seen: Pulse | None = None, least_epoch: int = 0) -> None:
        """Take over: fence earlier leaders, read back what they left. Raises StoreUnavailable; Fenced if the pulse is
        no longer what was `seen`."""
        self.epoch = await self.store.lead(max(int(self.clock() * 1000), least_epoch), seen)
        self.persister = Persister(
            self.store, self.epoch, self.settings.max_pending_steps, self.ledger, rewritten=self.recall.again
        )
        # From here on, since its beat keeps standbys from leading.
        self.persisting = asyncio.create_task(self.persister.run(), name="persister")
        try:
            await self.learning.take_over(self.epoch)
            if self._event_log:
                self._event_log.leading(self.core)
            self._heed_terms()
            await self.recall.begin()
        except BaseException:
            self.persisting.cancel()
            raise
        left, waiting = len(self.ledger.live), len(self.recall.unread)
        self._log.info("leading", epoch=self.epoch, with_kv=left, waiting=waiting, policy=self.settings.policy)

    def _read(self, id: str, stored: Stored | None) -> None:
        """A request that an earlier leader left: ours, if it is live."""
        if stored is not None and stored.ending is None:
            self.ledger.adopt(stored)
            self.core.restore([stored.record])
            if self._event_log:
                self._event_log.restored(stored.record)
            self._call_for(id)
        self.ledger.was_read(id, stored)

    async def run(self) -> None:
        """Until cancelled. What is ready to be stored is stored; deadlines pass. Raises Fenced, Outranked."""
        await first_of(lambda: self.persisting, self._tick, self.learning.run, self.recall.run)

    async def close(self) -> None:
        """After `run`: what was learned is kept, and whoever waits for it may lead at once."""
        self.over.set()
        await self.learning.close()
        with suppress(StoreUnavailable):
            await self.store.step_down(self.epoch)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self._obeyed > self.epoch:
                raise Outranked(self._obeyed)
            self._apply(self._observe(Tick()), {})
            for session in self.sessions.values():
                self._mind(session)

    def _observe(self, event: Event) -> tuple[Effect, ...]:
        now = self.clock()
        effects = self.core.observe(event, now)
        if self._event_log and (effects or not isinstance(event, Tick)):
            self._event_log.event(now, event)
        return effects

    # ---- workers ----

    async def attach(self, hello: worker_pb.Hello) -> WorkerSession:
        """A worker's new connection; its old one, if any, is void. Raises RequestError if it does not belong here."""
        checks.obeyed(hello.max_epoch, self.clock())
        self._obeyed = max(self._obeyed, hello.max_epoch)
        if self._obeyed > self.epoch:
            raise NotServing("a leader of a higher epoch was obeyed")
        with suppress(StoreUnavailable):  # then its KV of them is computed again
            await self.recall.fetch(held.request_id for held in hello.held)
        if self.model is not None and hello.model.fingerprint != self.model.fingerprint:
            raise BadInput("model", f"{hello.model.name} differs from what the other workers run: {self.model.name}")
        if self.model is None or not self.sessions:
            self.model = hello.model
        elif hello.model.context_tokens < self.model.context_tokens:
            raise BadInput("model", f"its context is smaller than the {self.model.context_tokens} tokens promised")
        if (old := self.sessions.get(hello.worker_id)) is not None:
            old.close()
        # What it holds is known to it, yet must be admitted again: its tokens are truncated to the durable ones.
        session = WorkerSession(hello.worker_id, hello.session, sent={held.request_id: -1 for held in hello.held})
        self.sessions[hello.worker_id] = session
        self._apply(self._observe(translate.to_worker_up(hello)), {})
        self._wake_all()
        self._announce()
        return session

    def detach(self, session: WorkerSession) -> None:
        """Its requests continue elsewhere with the tokens that they have, or here when it comes back."""
        if self.sessions.get(session.worker) is not session:
            return
        session.close()
        del self.sessions[session.worker]
        self._apply(self._observe(WorkerDown(session.worker, died=not session.left)), {})
        if suspects := len(self.core.isolation.suspects):
            self._log.warning("suspects", worker=session.worker, requests=suspects)
        self._wake_all()
        self._announce()

    def report(self, session: WorkerSession, report: worker_pb.StepReport, received_at: float) -> None:
        """A step's report: observe it and have the next command sent. `received_at`: time.perf_counter()."""
        if (report.session, report.epoch) != (session.id, self.epoch) or session.closed.is_set():
            return
        if report.draining and not self.core.workers[session.worker].draining:
            self._log.info("worker_draining", worker=session.worker)
            self._apply(self._observe(Draining(session.worker)), {})
            self._wake_all()
        if not report.rows:
            held = not session.command.rank and self.core.isolation.held(self.core.workers[session.worker])
            if held or report.free_blocks:  # of which a heartbeat says nothing; nobody has run since what was cancelled
                self._observe(Obeyed(session.worker, report.command_seq, report.free_blocks or None))
            if held:
                session.wake.set()  # the suspects may begin
            return
        session.count(report)
        if report.HasField("cost"):
            self._observe(CostChanged(session.worker, translate.to_cost(report.cost)))
        step = translate.to_step_done(session.worker, report)
        effects = self._observe(step)
        session.reported_at = received_at
        session.wake.set()
        self.insight.step_done(step, effects)
        self._apply(effects, {row.request_id: row for row in report.rows})

    def _mind(self, session: WorkerSession) -> None:
        """Give up on a worker that owes a round for too long, however alive it is: its device hangs.

        Counted in ticks: a scheduler that stood still for a while has not waited for anybody.
        """
        up, settings = self.core.workers[session.worker].up, self.settings
        expected_s = up.cost.round_s(up.max_draft, up.slots)
        expected_s += up.slots * settings.prefill_chunk * up.cost.prefill_token_s
        limit_s = settings.step_timeout_s + STEP_SLACK * expected_s
        if session.wait(TICK_S, settings.max_lag) >= limit_s and not session.closed.is_set():
            self._log.error("worker_hung", worker=session.worker, after_s=round(session.owed_s, 1))
            session.close()

    def command(self, session: WorkerSession) -> worker_pb.StepCommand:
        """The newest desired state of that worker."""
        worker = session.worker
        plan = self.core.plan(worker)
        if self._event_log:
            self._event_log.plan(worker, plan)
        if (idle := placement.idle_beside_work(self.core)) is not None and idle != worker:
            self.sessions[idle].wake.set()  # nothing else would: it has nothing to report
        forget = [id for id in plan.forget if session.sent.pop(id, None) is not None]
        admit = [self._admit(run.id, run.placement) for run in plan.rank if session.sent.get(run.id) != run.placement]
        session.sent.update((run.id, run.placement) for run in plan.rank)
        session.seq += 1
        new = [payload.request_id for payload in admit]
        for other in self.sessions.values():
            if other is not session and not other.sent.keys().isdisjoint(new):
                other.wake.set()  # its request was moved here: it has to forget it
        command = worker_pb.StepCommand(
            epoch=self.epoch,
            session=session.id,
            seq=session.seq,
            seen_step=session.seen_step,
            admit=admit,
            rank=translate.of_plan(plan),
            drop=plan.drop,
            offload=plan.offload,
            forget=forget,
        )
        session.commanded(command)
        return command

    def _admit(self, id: str, placement: int) -> worker_pb.Admit:
        submit = self.ledger.live[id].submit
        admit = worker_pb.Admit(
            request_id=id,
            placement=placement,
            tokens=submit.prompt,
            prompt_len=len(submit.prompt),
            sampling=submit.sampling,
            limits=submit.limits,
            tenant=submit.tenant,
        )
        admit.tokens.extend(self.ledger.live[id].output)
        return admit

    def _call_for(self, id: str) -> None:
        """A request has come: the worker that it concerns plans."""
        if (worker := placement.called_for(self.core, id)) is not None:
            self.sessions[worker].wake.set()

    def _wake_all(self) -> None:
        for session in self.sessions.values():
            session.wake.set()

    # ---- gateways ----

    def link(self, outbox: GatewayOutbox) -> None:
        self.outboxes.add(outbox)
        outbox.serving(self._serving())

    def unlink(self, outbox: GatewayOutbox) -> None:
        """A lost gateway costs no request: each goes on, and is followed again by offset."""
        self.outboxes.discard(outbox)
        self.ledger.leave(outbox)

    async def submit(self, submit: gateway_pb.Submit, outbox: GatewayOutbox) -> None:
        """Of the same id and content: the one that is there is followed. Raises StoreUnavailable."""
        id = submit.request_id
        await self.recall.fetch([id])
        if (known := self.ledger.live.get(id)) is not None and content(known.submit) == content(submit):
            if known.stored:
                outbox.accepted(id)
            await self.ledger.follow(id, 0, outbox)
            return
        try:
            self._admissible(submit, known)
            effects = self._observe(Submitted(translate.to_request(submit, self.clock(), self.learning.expect(submit))))
        except QueueIsFull as error:
            request_s = admission.request_s(self.core)
            after_ms = self._retries.after_ms(self.clock(), error.room_s, request_s)
            self._refuse(submit, outbox, QueueFull(str(error), retry_after_ms=after_ms))
        except TooLate as error:
            self._refuse(submit, outbox, DeadlinePassed(str(error)))
        except RequestError as error:
            outbox.refuse(id, error)
        else:
            (submitted,) = effects
            self.ledger.live[id] = Tracked(submit, submitted.record)
            self.ledger.join(id, outbox)
            self.insight.counts["submitted"] += 1
            self.persister.put([Write(submitted.record, submit=content(submit))])
            self._call_for(id)

    def _admissible(self, submit: gateway_pb.Submit, known: Tracked | None) -> None:
        if known is not None:
            raise DuplicateRequest(f"request_id: {submit.request_id} is taken by another request")
        if self.model is None or not self.sessions:
            raise NotServing("no warmed worker", retry_after_ms=1000)
        if self.persister.behind >= MAX_BEHIND:
            raise NotServing("the store is behind", retry_after_ms=1000)
        checks.submit(submit, self.model.context_tokens)
        unread = len(self.recall.unread)
        self.core.unseen = Unseen(unread, unread * self.model.context_tokens)
        self._heed_terms()

    def _heed_terms(self) -> None:
        """As the file says by now."""
        if self._terms is not None and (terms := self._terms.get()) is not self.core.tenants.terms:
            self.core.tenants.terms = terms
            if self._event_log:
                self._event_log.terms(terms)

    def _refuse(self, submit: gateway_pb.Submit, outbox: GatewayOutbox, error: RequestError) -> None:
        """For want of room or time."""
        self.insight.refused(submit.tenant)
        outbox.refuse(submit.request_id, error)

    async def follow(self, follow: gateway_pb.Follow, outbox: GatewayOutbox) -> None:
        """Everything durable from the offset on, then what comes. Raises StoreUnavailable."""
        if follow.request_id in self.recall.unread:
            self.ledger.follow_later(follow.request_id, follow.offset, outbox, follow.most_tokens)
        else:
            await self.ledger.follow(follow.request_id, follow.offset, outbox, follow.most_tokens)

    async def submission(self, id: str) -> gateway_pb.Submit:
        """Raises UnknownRequest, StoreUnavailable."""
        await self.recall.fetch([id])
        return await self.ledger.submission(id)

    async def cancel(self, id: str) -> None:
        """At once; for a request that is not live, nothing. Raises StoreUnavailable."""
        await self.recall.fetch([id])
        self._apply(self._observe(Cancelled(id)), {})

    def _serving(self) -> gateway_pb.Serving:
        return gateway_pb.Serving(ready=bool(self.sessions), model=self.model if self.sessions else None)

    def _announce(self) -> None:
        for outbox in self.outboxes:
            outbox.serving(self._serving())

    # ---- what is to be stored ----

    def _apply(self, effects: Sequence[Effect], rows: Mapping[str, worker_pb.Row]) -> None:
        """Hand the effects of an event to the store; a row without an effect was stale, and its tokens are dropped."""
        if effects:
            writes = [self._write(effect, rows.get(effect.record.request.id)) for effect in effects]
            self.persister.put(writes, planned=bool(rows))

    def _write(self, effect: Effect, row: worker_pb.Row | None) -> Write:
        record, id = effect.record, effect.record.request.id
        tracked = self.ledger.live[id]
        start, log, ending, brief = None, b"", None, False
        if row is not None and row.tokens and getattr(effect, "start", None) is not None:
            tracked.output.extend(row.tokens)
            brief = not row.prefilled and record.goes_on(tracked.written)
            logprobs = row.logprobs.SerializeToString() if row.HasField("logprobs") else b""
            start, log = row.start, encode(row.tokens, row.drafted, row.accepted, logprobs)
        if isinstance(effect, Ended):
            message = row.error if row is not None else ""
            if record.state is State.FAILED and row is None:
                message = f"{record.deaths} workers died while they ran this request alone: do not send it again"
                self._log.error("kills_workers", request_id=id, deaths=record.deaths)
            ending = translate.to_ending(record, effect.finish, self.clock(), message).SerializeToString()
            if record.state is State.FINISHED:
                self.learning.finished(tracked.submit, effect)
            self.insight.counts[record.state.value] += 1
            for session in self.sessions.values():
                if id in session.sent:
                    session.wake.set()
        tracked.written = record
        return Write(record, start=start, log=log, ending=ending, brief=brief)

    def _forget(self, id: str) -> None:
        """It is not ours to run, and nothing more is written of it."""
        self._observe(Cancelled(id))
        self._wake_all()
