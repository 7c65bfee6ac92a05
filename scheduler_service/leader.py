"""One scheduler's leadership: it takes over from the leader before, runs, and steps down. Here its parts are put
together; each has a file of its own.

    requests.py      what gateways ask            worker_pool.py   what workers report, and are told to run
    durable_core.py  events in, writes out        persister.py     the writes on their way to the store
    ledger.py        what is durable is relayed   recovery.py      what the leader before has left
    history.py       what ended a while ago       comparing.py     which policy would have served it how well

One event loop owns all of the state. No transport lives here: links/ holds the streams.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import count, islice
from uuid import uuid4

import structlog

from protos.errors import NotServing
from protos.link.v1 import worker_link_pb2 as worker_pb
from protos.serving import first_of
from protos.tracing import Tracing
from scheduler_service import checks, translate
from scheduler_service.clock import SteadyClock
from scheduler_service.comparing import Comparing
from scheduler_service.config import Settings
from scheduler_service.core.core import Core
from scheduler_service.core.events import Cancelled, Tick
from scheduler_service.counters import Counters
from scheduler_service.durable_core import DurableCore
from scheduler_service.event_log import EventLog
from scheduler_service.history import History
from scheduler_service.learning import Learning
from scheduler_service.ledger import Ledger
from scheduler_service.other_model import OtherModel
from scheduler_service.outbox import Outboxes
from scheduler_service.pace import UNITS, Lane, Turns
from scheduler_service.persister import Persister
from scheduler_service.recovery import CHUNK, Recovery
from scheduler_service.requests import Requests
from scheduler_service.session import Sessions, WorkerSession
from scheduler_service.standby import HigherEpoch
from scheduler_service.store import Fenced, Pulse, Store, Stored, StoreUnavailable
from scheduler_service.timelines import Timelines
from scheduler_service.trainer import Trainer
from scheduler_service.unreadable import Found
from scheduler_service.worker_pool import WorkerPool

TICK_S = 0.1
LOAD_TICKS = 3  # between two words on the load to gateways that choose between cells
ENDED_AT_ONCE = 32  # requests whose time is up, until other tasks run
FIRST_COMMIT_S = 20.0
CUT_OFF_S = 5.0  # without an answer of the store: perhaps this leader alone is cut off from it


class Leader:
    """`clock`: seconds since the Unix epoch; None: a steady one that begins now."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        clock: Callable[[], float] | None = None,
        trainer: Trainer | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.settings, self.clock = settings, (clock := SteadyClock() if clock is None else clock)
        self.core = Core(
            settings.make_policy(),
            draft_len=None if settings.draft_len == "auto" else settings.draft_len,
            prefill_chunk=settings.prefill_chunk,
            max_deaths=settings.max_deaths,
            bounds=settings.bounds,
            few_plans=settings.report_within_ms > 0,
            plans_lag=True,
            ready_first=settings.ready_first,
        )
        self.over = asyncio.Event()  # it leads no longer: all of its streams end
        self.links_ended = asyncio.Event()  # set when it does so, for their peers to look elsewhere; then replaced
        self._cut_off_s = CUT_OFF_S  # without the store, until it ends its links the next time
        self.epoch = 0
        self._highest_epoch = 0  # that any worker has obeyed
        self._attempt = uuid4().hex  # to lead; the same until one is answered
        self._pulses: list[Pulse] = []  # what each call under that name found
        self.turns = Turns(UNITS)  # of the event loop
        self.sessions, self.outboxes, self.counters = Sessions(), Outboxes(), Counters()
        self.timelines = Timelines(tracing)
        self.learning = Learning(settings.predictor, self.core, store, trainer)
        self.ledger = Ledger(store, drop=lambda id: self.durable.drop(id), turns=self.turns)
        self.recovery = Recovery(store, self._take, self.ledger.live.__contains__)
        self.ledger.strays = self.recovery.again
        self.persister = Persister(store, settings.max_pending_steps, self.ledger, rewritten=self.recovery.again)
        self.event_log = EventLog(settings.event_log) if settings.event_log else None
        history = History()
        self.comparing = Comparing(settings, self.core.fleet, history, clock)
        self.durable = DurableCore(
            self.core,
            clock,
            ledger=self.ledger,
            persister=self.persister,
            learning=self.learning,
            counters=self.counters,
            sessions=self.sessions,
            timelines=self.timelines,
            history=history,
            event_log=self.event_log,
        )
        live = self.ledger.live
        self._other_model = OtherModel(self.durable.fail, lambda: {id: tracked.model for id, tracked in live.items()})
        self._attaching = asyncio.Lock()
        self.workers = WorkerPool(settings, self.durable, self.ledger, self.sessions, self.outboxes)
        self.requests = Requests(
            settings,
            self.durable,
            self.workers,
            ledger=self.ledger,
            persister=self.persister,
            recovery=self.recovery,
            counters=self.counters,
            outboxes=self.outboxes,
            event_log=self.event_log,
        )
        self._store, self._log = store, structlog.get_logger()

    async def lead(self, seen: Pulse | None = None, least_epoch: int = 0) -> None:
        """Take over: fence earlier leaders, read back what they left. Raises StoreUnavailable, and may then be called
        again; Fenced if the pulse is no longer what was `seen`."""
        pulse = await self._store.pulse()
        if seen is not None and self.epoch and pulse.epoch == self.epoch:
            seen = pulse  # an earlier call has led, and broke off: what has changed since is its own
        self._pulses.append(seen or pulse)
        if self.ledger.live and self._pulses[0].epoch > self.epoch:  # another has gone on with what we have read
            raise Fenced("another leader has taken over since an earlier attempt")
        self.epoch = await self._store.lead(max(int(self.clock() * 1000), least_epoch), seen, self._attempt)
        # A call whose answer was lost has left an epoch of ours behind: what counts is the pulse before that.
        before = next((one for one in reversed(self._pulses) if one.epoch < self.epoch), pulse)
        self._attempt, self._pulses = uuid4().hex, []
        self.workers.epoch = self.epoch
        # Its commits begin now: without them a standby would take over while we still read.
        self.persisting = asyncio.create_task(self.persister.run(self.epoch, before), name="persister")
        try:
            await self.learning.take_over(self.epoch)
            if self.event_log:
                self.event_log.leading(self.core)
            self.requests.reload_tenant_terms()
            await self.recovery.begin(self.epoch)
            await self._acknowledged()
        except BaseException:
            await first_of(lambda: self.persisting, lambda: asyncio.sleep(0))  # cancelled, and surely at its end
            raise
        self.workers.led_since = self.clock()
        with_kv, waiting = len(self.ledger.live), len(self.recovery.unread)
        self._log.info("leading", epoch=self.epoch, with_kv=with_kv, waiting=waiting, policy=self.settings.policy)

    async def _acknowledged(self) -> None:
        """Returns once a commit of ours counts: then replicas, if any were asked for, have all that we have read."""
        first = asyncio.ensure_future(self.persister.acknowledged.wait())
        try:
            waits = (first, self.persisting)
            await asyncio.wait(waits, timeout=FIRST_COMMIT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            first.cancel()
        if self.persisting.done():
            self.persisting.result()
        if not self.persister.acknowledged.is_set():
            raise StoreUnavailable(self.persister.refusal or f"no commit was acknowledged in {FIRST_COMMIT_S:.0f} s")

    async def _take(self, id: str, found: Found) -> None:
        """A request that an earlier leader left was read. It is ours if it has not ended."""
        if isinstance(found, Stored) and found.ending is None:
            self.durable.restore(found)
            self.workers.call_for(id)
            self._other_model.restored(id, found.model)
        self.requests.was_read(id)
        # The task that had it read may be cancelled. Gateways that followed the request before get their answers still.
        await asyncio.shield(self.ledger.was_read(id, found))

    async def attach(self, hello: worker_pb.Hello, ask: Callable[[], Awaitable[bytes]] | None = None) -> WorkerSession:
        """A worker's new connection. `ask`: for the tokenizer that it has left out, if no other has brought it. Raises
        RequestError if the worker does not belong here."""
        if hello.max_epoch > self.epoch:  # its own one may be far ahead: this clock was, and has been mended
            checks.obeyed(hello.max_epoch, self.clock())
        self._highest_epoch = max(self._highest_epoch, hello.max_epoch)
        if self._highest_epoch > self.epoch:
            raise NotServing("a leader of a higher epoch was obeyed")
        with suppress(StoreUnavailable):  # then the KV that the worker holds of unread requests is computed again
            await self.recovery.fetch(held.request_id for held in hello.held)
        try:
            # Read until one of them tells for which model the others wait.
            while self.workers.model_stays and not self.workers.own_model and self.recovery.unread:
                await self.recovery.fetch(list(islice(self.recovery.unread, CHUNK)))
        except StoreUnavailable:
            raise NotServing("it cannot be read yet for which model stored requests wait") from None
        async with self._attaching:  # of two first workers with different models the second is refused
            self.workers.check_model(hello.model.name, hello.model.fingerprint)
            if ask is not None and not self.workers.has_tokenizer(hello):
                hello.model.tokenizer_json = await ask()
            await self._other_model.serve(hello.model.fingerprint)  # only now: the worker may be gone by its answer
            if self.learning.serve(hello.model.fingerprint):
                self.comparing.forget()
                if self.event_log:
                    self.event_log.forgot()
            return self.workers.attach(hello)

    async def run(self) -> None:
        """Until cancelled. Raises Fenced, HigherEpoch."""
        parts = self.ledger.answer_again, self.recovery.run, self.learning.run, self.comparing.run
        await first_of(lambda: self.persisting, self._tick, *parts)

    async def _tick(self) -> None:
        """End requests past their deadline, and those that no gateway wants; give up hung workers. Time is counted in
        ticks: a scheduler that stood still for a while has not waited for anybody."""
        for tick in count():
            await asyncio.sleep(TICK_S)
            self.requests.count_unread()
            if tick % LOAD_TICKS == 0 and self.workers.served:
                self.outboxes.tell_load(lambda: translate.to_load(self.core.fleet))
            if self._highest_epoch > self.epoch:
                raise HigherEpoch(self._highest_epoch)
            if self.settings.standby:
                self._send_away(self.persister.silent_s)
            while self.durable.apply(Tick(ENDED_AT_ONCE)):  # a burst of requests may have one deadline
                await self.turns.room(UNITS, Lane.DEADLINES)
            self.workers.close_hung(TICK_S)
            for id in self.ledger.orphans(TICK_S, self.settings.orphan_timeout_s):
                self._log.info("orphan_cancelled", request_id=id)
                self.durable.apply(Cancelled(id))

    def _send_away(self, silent_s: float) -> None:
        """After 5, 10, 20 ... seconds without the store gateways and workers are to look whether another scheduler
        leads; where none does they come back."""
        if silent_s < CUT_OFF_S:
            self._cut_off_s = CUT_OFF_S
        elif silent_s >= self._cut_off_s:
            self._cut_off_s *= 2
            self._log.warning("links_ended", reason="the store does not answer: another scheduler may lead by now")
            self.sessions.send_away()
            self.links_ended.set()
            self.links_ended = asyncio.Event()

    async def close(self) -> None:
        """After `run`: keep what was learned, and let a standby lead at once."""
        self.over.set()
        await self.learning.close()
        if self.event_log:
            self.event_log.close()
        with suppress(StoreUnavailable):
            await self._store.step_down(self.epoch)
