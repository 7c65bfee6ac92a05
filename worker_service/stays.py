"""Spans of traced requests on this worker: each from its admission until it has ended or gone from here. Told by the
messages of the link; the model's thread knows nothing of it."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from protos.link.v1 import worker_link_pb2 as pb
from protos.tracing import Attribute, Tracing, sampled


@dataclass(slots=True)
class _Stay:
    """What one request did here. `since`: seconds since the Unix epoch."""

    parent: str
    since: float
    rounds: int = 0
    tokens: int = 0
    prefilled: int = 0
    drafted: int = 0
    accepted: int = 0


class Stays:
    """`tracing`: where the spans go; None: nowhere. `worker`: this worker's id."""

    def __init__(self, tracing: Tracing | None, worker: str, clock: Callable[[], float] = time.time) -> None:
        self._tracing, self._worker, self._clock = tracing, worker, clock
        self._stays: dict[str, _Stay] = {}

    def commanded(self, command: pb.StepCommand) -> None:
        if self._tracing is None:
            return
        for id in command.forget:
            self._end(id)
        for admit in command.admit:
            self._end(admit.request_id)
            if sampled(admit.traceparent):
                self._stays[admit.request_id] = _Stay(admit.traceparent, self._clock())

    def reported(self, report: pb.StepReport) -> None:
        if not self._stays:
            return
        for row in report.rows:
            if (stay := self._stays.get(row.request_id)) is not None:
                stay.rounds += len(row.tokens_per_round) or (row.skipped == pb.SKIP_UNSPECIFIED)
                stay.tokens += len(row.tokens)
                stay.prefilled += row.prefilled
                stay.drafted += row.drafted
                stay.accepted += row.accepted
                if row.finish:
                    self._end(row.request_id)

    def detached(self) -> None:
        """The connection has ended. The scheduler admits anew what goes on here."""
        for id in list(self._stays):
            self._end(id)

    def _end(self, id: str) -> None:
        stay = self._stays.pop(id, None)
        if stay is not None and self._tracing is not None:
            told: dict[str, Attribute] = {
                "laps_sd.worker": self._worker,
                "laps_sd.rounds": stay.rounds,
                "laps_sd.output_tokens": stay.tokens,
                "laps_sd.prefilled_tokens": stay.prefilled,
                "laps_sd.drafted_tokens": stay.drafted,
                "laps_sd.accepted_tokens": stay.accepted,
            }
            self._tracing.span(stay.parent, "worker", stay.since, self._clock(), told)
