"""Steps on their way into reports: one report each, or several steps that can wait in one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worker_service.engine.types import CostProfile, StepResult


@dataclass(frozen=True, slots=True)
class Report:
    """Consecutive steps that all ran the same requests. A command that lists none is answered by one step without rows.

    Seconds, of all its steps: `other_s` is all but drafting and the forward pass, `idle_s` the time before them with
    work at hand but without permission.
    """

    step: int  # number of the last step
    command_seq: int  # which command that step ran
    results: Sequence[StepResult]
    other_s: float
    idle_s: float
    cost: CostProfile | None = None  # if it has changed since it was last reported


class Reporter:
    """The reports of one session. Used in the model's thread alone."""

    def __init__(self, send: Callable[[Report], None], most: int) -> None:
        """`send` is given each report. At most `most` steps go into one."""
        self._send, self._most = send, most
        self._waiting: list[Report] = []  # steps that are not reported yet
        self._ran: frozenset[tuple[str, int]] = frozenset()  # requests and placements of the last step
        self._due = 0.0  # when the first of the waiting steps must be reported

    def add(self, report: Report, ended: float, took_s: float, within_s: float) -> None:
        """A step that ended at `ended` after `took_s`. It is reported within `within_s` seconds if the next step takes
        no longer, and at once if a request started in it, ended, was skipped or prefilled, or if others ran before
        it."""
        (result,) = report.results
        ran = frozenset((row.request_id, row.placement) for row in result.rows)
        if changed := ran != self._ran:
            self.flush()
            self._ran = ran
        if not self._waiting:
            self._due = ended + within_s
        self._waiting.append(report)
        urgent = any(row.finish or row.skipped or row.prefilled or not row.start for row in result.rows)
        if not within_s or changed or urgent or len(self._waiting) >= self._most or ended + took_s > self._due:
            self.flush()

    def answer(self, report: Report) -> None:
        """What a command that lists no request gets: at once, behind the steps before it."""
        self.flush()
        self._send(report)

    def flush(self) -> None:
        """Report now what is not reported yet."""
        if not self._waiting:
            return
        last, costs = self._waiting[-1], [each.cost for each in self._waiting if each.cost]
        self._send(
            Report(
                last.step,
                last.command_seq,
                [result for each in self._waiting for result in each.results],
                sum(each.other_s for each in self._waiting),
                sum(each.idle_s for each in self._waiting),
                costs[-1] if costs else None,
            )
        )
        self._waiting.clear()
