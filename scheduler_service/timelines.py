"""Where the time of each request goes: queued, prefill, running, paused. Told by the changes of its state, never by a
round that merely went on. It decides nothing.

A pause lasts from when the request is known to have stopped until it runs again, whether its KV was kept or not.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from protos.metrics import Distribution
from protos.tracing import Tracing, sampled
from scheduler_service.core.lifecycle import State
from scheduler_service.core.types import Ended, Finish, Record

MOST_SPANS = 64  # intervals of one request that are traced each by itself; what comes after them is one span
SHARES = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Phase(StrEnum):
    QUEUED = "queued"  # until its first round begins
    PREFILL = "prefill"  # until its first token is reported
    RUNNING = "running"
    PAUSED = "paused"


@dataclass(slots=True)
class _Timeline:
    """Of one live request. Times are seconds since the Unix epoch."""

    phase: Phase
    since: float  # when that phase began
    predicted: int | None  # output tokens, when it was submitted; None: it was taken over from an earlier leader
    parent: str  # the span that its own are put under; empty: it is not traced
    worker: str = ""  # on which it runs, or ran last
    first_token: float | None = None
    paused_s: float = 0.0
    longest_pause_s: float = 0.0
    spans: int = 0
    runs: int = 0
    pauses: int = 0
    rest: float | None = None  # when the part began that no span of its own tells of


class Timelines:
    """Of all live requests. `tracing`: where intervals go as spans; None: nowhere."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        self._tracing = tracing
        self._live: dict[str, _Timeline] = {}
        self._paused: dict[str, float] = {}  # since when; the longest first
        self.queue_time, self.prefill_time = Distribution(SECONDS), Distribution(SECONDS)
        self.decode_time, self.inference_time = Distribution(SECONDS), Distribution(SECONDS)
        self.paused_time, self.longest_pause = Distribution(SECONDS), Distribution(SECONDS)
        self.predicted_over_true = Distribution(SHARES)

    def longest_pause_s(self, now: float) -> float:
        """Of the pauses that have not ended; 0 if there is none."""
        return max(0.0, now - next(iter(self._paused.values()), now))

    # ---- what happens ----

    def submitted(self, record: Record, predicted: int, parent: str) -> None:
        """`parent`: a traceparent, or empty."""
        request = record.request
        self._live[request.id] = _Timeline(Phase.QUEUED, request.arrival, predicted, self._sampled(parent))

    def restored(self, record: Record, now: float, parent: str) -> None:
        """An earlier leader left it. What it did there is not known here, except for when it came and began."""
        queued = record.started is None
        phase, since = (Phase.QUEUED, record.request.arrival) if queued else (Phase.PAUSED, now)
        timeline = self._live[record.request.id] = _Timeline(phase, since, None, self._sampled(parent))
        self._began(record.request.id, timeline)

    def changed(self, record: Record, now: float, worker: str = "") -> None:
        """Its record has changed: it ran, or it was stopped. `worker`: who reported that, if anybody."""
        id = record.request.id
        if (timeline := self._live.get(id)) is not None:
            self._follow(id, timeline, record, _phase(record), now, worker)

    def stopped(self, ids: Iterable[str], now: float) -> None:
        """A plan takes their KV away."""
        for id in ids:
            timeline = self._live.get(id)
            if timeline is not None and timeline.phase in (Phase.PREFILL, Phase.RUNNING):
                self._enter(id, timeline, Phase.PAUSED, now)

    def ended(self, ended: Ended, now: float, worker: str = "") -> None:
        record = ended.record
        id = record.request.id
        if (timeline := self._live.get(id)) is None:
            return
        if record.started is not None:
            if ended.start is not None:  # it ended by a round of its own
                self._follow(id, timeline, record, Phase.RUNNING if record.emitted else Phase.PREFILL, now, worker)
            self._count(timeline, record, ended, now)
        self.dropped(id, now)

    def dropped(self, id: str, now: float) -> None:
        """It turned out not to be ours to run."""
        if (timeline := self._live.pop(id, None)) is not None:
            self._finish(id, timeline, now)
            if timeline.rest is not None and self._tracing is not None:
                self._tracing.span(timeline.parent, "rest", timeline.rest, now)

    # ---- how it is kept ----

    def _follow(self, id: str, timeline: _Timeline, record: Record, phase: Phase, now: float, worker: str) -> None:
        if phase is timeline.phase:
            return
        if timeline.phase is Phase.QUEUED and record.started is not None:
            began = max(record.started, timeline.since)  # by its worker's clock it may have begun before it came
            self._enter(id, timeline, Phase.PREFILL, began)
            timeline.worker = worker
        if record.emitted and timeline.first_token is None:
            timeline.first_token = now
        if phase is not timeline.phase:
            self._enter(id, timeline, phase, now)
        if phase is not Phase.PAUSED:
            timeline.worker = worker

    def _enter(self, id: str, timeline: _Timeline, phase: Phase, now: float) -> None:
        self._finish(id, timeline, now)
        timeline.phase, timeline.since = phase, now
        self._began(id, timeline)

    def _began(self, id: str, timeline: _Timeline) -> None:
        if timeline.phase is Phase.PAUSED:
            timeline.pauses += 1
            self._paused[id] = timeline.since
        elif timeline.phase is Phase.RUNNING:
            timeline.runs += 1

    def _finish(self, id: str, timeline: _Timeline, now: float) -> None:
        """The phase that it is in is over."""
        if timeline.phase is Phase.PAUSED:
            paused_s = max(0.0, now - self._paused.pop(id))  # the clock may have been set back
            timeline.paused_s += paused_s
            timeline.longest_pause_s = max(timeline.longest_pause_s, paused_s)
        told = now > timeline.since or timeline.phase is Phase.QUEUED  # each was queued, if for no time at all
        if timeline.parent and self._tracing is not None and told:
            timeline.spans += 1
            if timeline.spans <= MOST_SPANS:
                ran = {"laps_sd.worker": timeline.worker} if timeline.phase in (Phase.PREFILL, Phase.RUNNING) else None
                self._tracing.span(timeline.parent, _name(timeline), timeline.since, now, ran)
            elif timeline.rest is None:
                timeline.rest = timeline.since

    def _count(self, timeline: _Timeline, record: Record, ended: Ended, now: float) -> None:
        """It has begun, and ended now."""
        assert record.started is not None
        self.queue_time.observe(max(0.0, record.started - record.request.arrival))
        if timeline.predicted is None:
            return
        self.paused_time.observe(timeline.paused_s)
        self.longest_pause.observe(timeline.longest_pause_s)
        if timeline.first_token is not None:
            self.prefill_time.observe(max(0.0, timeline.first_token - record.started))
            self.decode_time.observe(max(0.0, now - timeline.first_token))
            self.inference_time.observe(max(0.0, now - record.started))
        if ended.finish in (Finish.STOP, Finish.LENGTH) and not ended.cut and record.emitted:
            self.predicted_over_true.observe(timeline.predicted / record.emitted)

    def _sampled(self, parent: str) -> str:
        return parent if self._tracing is not None and sampled(parent) else ""


def _phase(record: Record) -> Phase:
    """Of a live request."""
    if record.started is None:
        return Phase.QUEUED
    if record.state is not State.RUNNING:
        return Phase.PAUSED
    return Phase.RUNNING if record.emitted else Phase.PREFILL


def _name(timeline: _Timeline) -> str:
    match timeline.phase:
        case Phase.RUNNING:
            return f"running {timeline.runs}"
        case Phase.PAUSED:
            return f"paused {timeline.pauses}"
    return timeline.phase.value
