"""The core, and the way from what it decides to the store: the only place where an event changes the state.

An event goes into the core, and each effect becomes a write for the store. Nobody waits for that write here: the
persister makes it durable, and the ledger then tells the gateways. No transport lives here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import structlog

from protos.idempotence import content
from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import gateway_link_pb2 as gateway_pb
from protos.link.v1 import worker_link_pb2 as worker_pb
from scheduler_service import translate
from scheduler_service.core.core import Core
from scheduler_service.core.events import Cancelled, Event, StepDone, Submitted, Tick
from scheduler_service.core.lifecycle import State
from scheduler_service.core.types import Advanced, Changed, Effect, Ended, Plan, WentOn
from scheduler_service.counters import Counters
from scheduler_service.event_log import EventLog
from scheduler_service.history import History
from scheduler_service.learning import Learning
from scheduler_service.ledger import Ledger
from scheduler_service.outbox import GatewayOutbox
from scheduler_service.persister import Persister
from scheduler_service.reports import Output
from scheduler_service.session import Sessions
from scheduler_service.store import Stored, Write
from scheduler_service.store.rounds import LoggedRound, encode
from scheduler_service.timelines import Timelines
from scheduler_service.tracked import Tracked

Outputs = Mapping[str, Output]
NO_OUTPUTS: Outputs = {}


class DurableCore:
    """`clock`: seconds since the Unix epoch. `sessions`: the workers that are told when a request of theirs ends."""

    def __init__(
        self,
        core: Core,
        clock: Callable[[], float],
        *,
        ledger: Ledger,
        persister: Persister,
        learning: Learning,
        counters: Counters,
        sessions: Sessions,
        timelines: Timelines,
        history: History,
        event_log: EventLog | None,
    ) -> None:
        self.core, self.clock = core, clock
        self._ledger, self._persister, self._learning = ledger, persister, learning
        self._counters, self._sessions, self._event_log = counters, sessions, event_log
        self._timelines = timelines
        self._history = history
        self._log = structlog.get_logger()

    def observe(self, event: Event) -> tuple[Effect, ...]:
        """Change the core, and store nothing. Raises what Core.observe raises."""
        now = self.clock()
        effects = self.core.observe(event, now)
        if self._event_log and (effects or not isinstance(event, Tick)):
            self._event_log.event(now, event)
        return effects

    def apply(self, event: Event) -> int:
        """Change the core, and store what came of it. Returns how many effects there were."""
        self._store(effects := self.observe(event), NO_OUTPUTS)
        return len(effects)

    def step_done(self, step: StepDone, outputs: Outputs) -> None:
        """The report of a round. `outputs`: its rows by request id. A row to which the core answers with no effect was
        stale, and its tokens are dropped."""
        effects = self.observe(step)
        self._counters.step_done(step, effects)
        self._store(effects, outputs, step.worker)

    def submit(self, submit: gateway_pb.Submit, model: str, outbox: GatewayOutbox) -> None:
        """A new request, followed by that gateway. `model`: fingerprint of the one that it runs on. Raises QueueIsFull,
        TooLate; then nothing has changed."""
        request = translate.to_request(submit, self.clock(), self._learning.expect(submit))
        (submitted,) = self.observe(Submitted(request))
        assert isinstance(submitted, Changed)
        self._ledger.live[request.id] = Tracked(submit, submitted.record, model=model)
        self._ledger.join(request.id, outbox)
        self._counters.submitted += 1
        predicted = self.core.fleet.entries[request.id].predicted_tokens
        self._timelines.submitted(submitted.record, predicted, submit.traceparent)
        self._persister.put([Write(submitted.record, submit=content(submit), model=model)])

    def restore(self, stored: Stored) -> None:
        """A live request that an earlier leader left."""
        self._ledger.adopt(stored)
        self.core.restore([stored.record])
        submit = self._ledger.live[stored.record.request.id].submit
        self._timelines.restored(stored.record, self.clock(), submit.traceparent)
        if self._event_log:
            self._event_log.restored(stored.record)

    def fail(self, id: str, message: str) -> None:
        """End a live request that cannot be run any more; its client gets the message."""
        for effect in self.observe(Cancelled(id)):
            assert isinstance(effect, Ended)
            record = replace(effect.record, state=State.FAILED)
            self._log.error("request_failed", request_id=id, reason=message)
            self._counters.ended[State.FAILED] += 1
            self._timelines.ended(effect, self.clock())
            self._sessions.wake_holder(id)
            ending = translate.to_ending(record, None, self.clock(), message)
            self._persister.put([Write(record, ending=ending.SerializeToString())])

    def drop(self, id: str) -> None:
        """The request is not ours to run: another one has its id. Nothing more is stored under that id."""
        self.observe(Cancelled(id))
        self._counters.repeated += 1
        self._timelines.dropped(id, self.clock())
        self._sessions.wake_holder(id)

    def plan(self, worker: str) -> Plan:
        plan = self.core.plan(worker)
        self._counters.commands += 1
        if plan.drop or plan.offload:
            self._timelines.stopped((*plan.drop, *plan.offload), self.clock())
        if self._event_log:
            self._event_log.plan(worker, plan)
        return plan

    def _store(self, effects: Sequence[Effect], outputs: Outputs, worker: str | None = None) -> None:
        if effects:
            writes: list[Write] = []
            for effect in effects:
                if isinstance(effect, WentOn):
                    writes += [self._write_round(id, outputs[id]) for id in effect.ids]
                else:
                    writes.append(self._write(effect, outputs.get(effect.record.request.id), worker or ""))
            self._persister.put(writes, worker)

    def _write_round(self, id: str, output: Output) -> Write:
        """Of a request of which nothing else has changed since its record was written. Called for most rows: arguments
        with names would cost more."""
        tracked = self._ledger.live[id]
        return Write(tracked.written, None, output[0].start, _take(tracked, output), None, True, output[0].new)

    def _write(self, effect: Changed | Advanced | Ended, output: Output | None, worker: str) -> Write:
        record = effect.record
        tracked = self._ledger.live[record.request.id]
        start, log, ending = None, b"", None
        if output is not None and output[1] and not isinstance(effect, Changed) and effect.start is not None:
            start, log = output[0].start, _take(tracked, output)
        if isinstance(effect, Ended):
            self._timelines.ended(effect, self.clock(), worker)
            ending = self._end(effect, tracked, output[2] if output else None).SerializeToString()
        else:
            self._timelines.changed(record, self.clock(), worker)
        tracked.written = record
        return Write(record, start=start, log=log, ending=ending)

    def _end(self, ended: Ended, tracked: Tracked, row: worker_pb.Row | None) -> gateway_pb.Ending:
        record = ended.record
        message = row.error if row is not None else ""
        if ended.reason:
            message = ended.reason
            self._log.error("request_failed", request_id=record.request.id, reason=message)
        elif record.state is State.FAILED and row is None:
            message = f"{record.deaths} workers died while they ran this request alone: do not send it again"
            self._log.error("kills_workers", request_id=record.request.id, deaths=record.deaths)
        if record.state is State.FINISHED:
            self._learning.finished(tracked.submit, ended)
            sampling, prompt = tracked.submit.sampling, len(tracked.submit.prompt)
            scores = prompt * (sampling.prompt_logprobs + 1) if sampling.HasField("prompt_logprobs") else 0
            logprobs = sampling.HasField("logprobs")
            self._history.add(record, self.clock(), tracked.log, logprobs=logprobs, scores=scores)
        self._counters.ended[record.state] += 1
        if row is None:  # else its worker knows, and is answered like after any report
            self._sessions.wake_holder(record.request.id)
        return translate.to_ending(record, ended.finish, self.clock(), message)


def _take(tracked: Tracked, output: Output) -> bytes:
    """The row's tokens become output. Returns its rounds as they are stored."""
    row, tokens, sent = output
    tracked.output += tokens
    if not row.each:
        logprobs = sent.logprobs.SerializeToString() if sent.HasField("logprobs") else b""
        return _log(tracked, LoggedRound(row.start, tuple(tokens), row.drafted, row.accepted, logprobs))
    log, at = b"", 0
    for count, drafted, accepted in row.each:
        told = common_pb.Logprobs(tokens=sent.logprobs.tokens[at : at + count])
        if count and not at:  # the first round with tokens
            told.MergeFrom(common_pb.Logprobs(prompt=sent.logprobs.prompt, embedding=sent.logprobs.embedding))
        logprobs = told.SerializeToString()
        log += _log(tracked, LoggedRound(row.start + at, tuple(tokens[at : at + count]), drafted, accepted, logprobs))
        at += count
    return log


def _log(tracked: Tracked, round: LoggedRound) -> bytes:
    """The round is on its way to the store. Returns it as it is stored."""
    encoded = encode(round.tokens, round.drafted, round.accepted, round.logprobs)
    tracked.rounds.append((round, encoded))
    return encoded
