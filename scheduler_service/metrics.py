"""What Prometheus sees of the scheduler. All of it is kept elsewhere, and read when Prometheus asks: nothing here looks
at a request, since there may be thousands and the workers wait meanwhile."""

from collections.abc import Callable, Iterable
from functools import partial
from heapq import nlargest
from math import isfinite

from protos.metrics import PREFIX, Distribution, Families, Reading, loop_lag
from scheduler_service.core import backlog
from scheduler_service.core.lifecycle import State
from scheduler_service.core.types import RequestClass
from scheduler_service.leader import Leader

MOST_TENANTS = 20  # that are named; the others are counted together
OTHERS = "other"

_COUNTED = {
    "requests_submitted": ("submitted", "Requests admitted"),
    "requests_repeated": ("repeated", "Of those, requests whose id was known already: sent again, or refused"),
    "num_preemptions": ("preemptions", "Requests stopped in favour of others, their KV kept"),
    "scheduled_tokens": ("tokens", "Output tokens that workers reported"),
    "commands": ("commands", "Commands to workers"),
    "reports": ("reports", "Reports of workers, heartbeats left out"),
}
_TIMES = {
    "request_queue_time_seconds": ("queue_time", "From submission to the first round, of requests that ended"),
    "request_prefill_time_seconds": ("prefill_time", "From the first round to the first token"),
    "request_decode_time_seconds": ("decode_time", "From the first token to the end, pauses included"),
    "request_inference_time_seconds": ("inference_time", "From the first round to the end: prefill and decode"),
    "request_paused_time_seconds": ("paused_time", "How long a request that began did not run until its end"),
    "request_longest_pause_seconds": ("longest_pause", "The longest single pause of a request that began; 0: none"),
    "request_predicted_over_true_length": (
        "predicted_over_true",
        "Output tokens predicted at submission over those that came; without requests that max_tokens cut",
    ),
}


class Metrics(Families):
    """`leader`: who leads in this process, if anybody. Counters begin anew with each leader, as Prometheus expects of a
    process that starts again."""

    def __init__(self, leader: Callable[[], Leader | None], prefix: str = PREFIX) -> None:
        super().__init__(prefix, lambda: _model(leader()))
        self._leader = leader
        self.lag = loop_lag(self)
        self.gauge("leads", "1 while this scheduler leads", lambda: float(leader() is not None))
        self._now()
        self._so_far()

    def _now(self) -> None:
        for state, text in (
            (State.WAITING, "Requests without KV on a worker that wait for a slot"),
            (State.RUNNING, "Requests that ran in the last round of their worker"),
            (State.PAUSED, "Requests that were preempted and keep their KV"),
        ):
            name = f"num_requests_{state.value}"
            self._led(self.gauge, name, text, partial(_in_state, state))
            self._led(self.gauge, f"{name}_by_class", f"{text}, by class", partial(_by_class_in_state, state), "class")
        text = f"Requests that wait, of the {MOST_TENANTS} tenants with the most; of all others together: {OTHERS}"
        self._led(self.gauge, "num_requests_waiting_by_tenant", text, _waiting_by_tenant, "tenant")
        text = "Longest of the pauses that have not ended"
        self._led(self.gauge, "longest_pause_seconds", text, lambda now: now.timelines.longest_pause_s(now.clock()))
        text = "Until all that waits and runs of this class, and what goes before it, is served"
        self._led(self.gauge, "backlog_seconds", text, _backlog_s, "class")
        self._led(self.gauge, "workers", "Attached workers", lambda now: float(len(now.sessions)))
        text = "Workers that are coming and load their model"
        self._led(self.gauge, "workers_loading", text, lambda now: float(len(now.workers.loading)))
        text = "Attached workers that are about to end and get nothing new"
        self._led(self.gauge, "workers_draining", text, _draining)
        text = "Requests that all attached workers run at once, at most"
        self._led(self.gauge, "slots", text, lambda now: float(now.core.fleet.slots))
        text = "Batches of writes that wait for the store"
        self._led(self.gauge, "unstored_batches", text, lambda now: float(now.persister.behind))
        text = "Requests of an earlier leader that are still to be read from the store"
        self._led(self.gauge, "unread_requests", text, lambda now: float(len(now.recovery.unread)))

    def _so_far(self) -> None:
        for name, (field, text) in _COUNTED.items():
            self._led(self.counter, name, text, partial(_counted, field))
        text = "Requests that were refused, by the reason of the error"
        self._led(self.counter, "admission_rejections", text, lambda now: now.counters.refused_for, "reason")
        text = "Requests that ended, by how"
        self._led(self.counter, "requests_ended", text, _ended, "state")
        for name, (field, text) in _TIMES.items():
            self._led(self.histogram, name, text, partial(_time, field))
        text = "How long the oldest write of a commit has waited to become durable"
        self._led(self.histogram, "commit_lag_seconds", text, lambda now: now.persister.lag)
        text = "From a worker's report to the command that answers it"
        self._led(self.histogram, "report_to_command_seconds", text, lambda now: now.counters.report_to_command)

    def _led(
        self,
        declare: Callable[..., None],
        name: str,
        text: str,
        read: Callable[[Leader], Reading | Distribution],
        *label: str,
    ) -> None:
        """A family that has samples only while somebody leads here."""
        declare(name, text, lambda: {} if (leader := self._leader()) is None else read(leader), *label)


def _model(leader: Leader | None) -> str:
    return leader.workers.model.name if leader is not None and leader.workers.model is not None else ""


def _in_state(state: State, leader: Leader) -> float:
    return float(sum(leader.core.fleet.classes.in_state(state).values()))


def _by_class_in_state(state: State, leader: Leader) -> Reading:
    return _by_class(leader.core.fleet.classes.in_state(state).items())


def _draining(leader: Leader) -> float:
    return float(sum(worker.draining for worker in leader.core.fleet.workers.values()))


def _waiting_by_tenant(leader: Leader) -> Reading:
    waiting = leader.core.fleet.tenants.waiting()
    named = dict(nlargest(MOST_TENANTS, waiting.items(), key=lambda item: item[1]))
    if others := sum(waiting.values()) - sum(named.values()):
        named[OTHERS] = named.get(OTHERS, 0) + others
    return named


def _backlog_s(leader: Leader) -> Reading:
    """Without workers nobody knows: then it has no samples."""
    return _by_class((klass, s) for klass, s in backlog.waits_s(leader.core.fleet).items() if isfinite(s))


def _by_class(values: Iterable[tuple[RequestClass, float]]) -> dict[str, float]:
    return {klass.name.lower(): value for klass, value in values}


def _counted(field: str, leader: Leader) -> float:
    return float(getattr(leader.counters, field))


def _ended(leader: Leader) -> Reading:
    return {state.value: float(number) for state, number in leader.counters.ended.items()}


def _time(field: str, leader: Leader) -> Distribution:
    kept: Distribution = getattr(leader.timelines, field)
    return kept
