"""What steps did, on its way into reports: at once, or several rounds of a request together. Nothing is run here."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from worker_service.engine.types import CostProfile, Row, Skip


class Seconds(NamedTuple):
    """Drafting, the forward pass and all else in steps; the time between them with work but no permission; in steps
    again, waiting for drafts from elsewhere."""

    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0
    idle: float = 0.0
    wait: float = 0.0


NO_TIME = Seconds()


@dataclass(frozen=True, slots=True)
class Report:
    """What requests did since they were last reported. Without any it answers a command that lists no request."""

    step: int  # number of the last step
    command_seq: int  # which command that step ran
    free_blocks: int  # of KV, after it
    rounds: Sequence[Sequence[Row]] = ()  # of each request, in order; a last one may say why it does not run any more
    partial: bool = False  # other requests ran in the last step, too: their rounds come later
    seconds: Seconds = NO_TIME  # of all steps since the last report
    last_s: float = 0.0  # that the last step took
    cost: CostProfile | None = None  # if it has changed since it was last reported


class Reporter:
    """The reports of one session. Used in the model's thread alone."""

    def __init__(self, send: Callable[[Report], None], most: int) -> None:
        """`send` is given each report. At most `most` rounds of a request wait for one."""
        self._send, self._most = send, most
        self._waiting: dict[str, list[Row]] = {}  # rounds that are not reported yet, by request
        self._due: dict[str, float] = {}  # when the first of them must be reported
        self._ran: dict[str, Row] = {}  # the last round of each request that ran in the last step and goes on
        self._last = Report(0, 0, 0)  # the state after the last step, without rounds

    def add(self, last: Report, rows: Iterable[Row], ended: float, took_s: float, within_s: float) -> None:
        """A step that ended at `ended` after `took_s` did this; `last` is the rest of what a report says of it.

        A round is reported within `within_s` seconds if the next step takes no longer, and at once if its request
        starts or resumes in it, ends, prefills or is skipped. That a request was preempted is said at once, too.
        """
        seconds = Seconds(*map(sum, zip(self._last.seconds, last.seconds, strict=True)))
        self._last = replace(last, seconds=seconds, last_s=took_s, cost=last.cost or self._last.cost)
        before, self._ran, due = self._ran, {}, set()
        for row in rows:
            id = row.request_id
            rounds = self._waiting.setdefault(id, [])
            if rounds and rounds[-1].placement != row.placement:
                rounds.clear()  # admitted anew since: the scheduler takes none of them, and this round begins before
            if not rounds:
                self._due[id] = ended + within_s
            rounds.append(row)
            old = before.pop(id, None)
            if row.skipped is None and row.finish is None:
                self._ran[id] = row
            goes_on = old is not None and old.placement == row.placement and id in self._ran and not row.prefilled
            if not (within_s and goes_on and len(rounds) < self._most and ended + took_s <= self._due[id]):
                due.add(id)
        if within_s:
            for id, row in before.items():  # they ran in the step before, and did not in this one
                start = row.start + len(row.tokens)
                preempted = Row(id, row.placement, start, blocks=row.blocks, skipped=Skip.PREEMPTED)
                self._waiting.setdefault(id, []).append(preempted)
        due |= before.keys() & self._waiting.keys()
        self._report(due)

    def answer(self, command_seq: int, free_blocks: int) -> None:
        """What a command that lists no request gets: at once, behind the rounds of the steps before it."""
        self.flush()
        self._send(Report(self._last.step, command_seq, free_blocks))

    def flush(self) -> None:
        """Report now all that is not reported yet."""
        self._report(self._waiting.keys())

    def _report(self, due: Iterable[str]) -> None:
        if not due:
            return
        last, ids = self._last, [id for id in self._waiting if id in due]
        partial = any(id not in due for id in self._ran)
        self._send(replace(last, rounds=[self._waiting.pop(id) for id in ids], partial=partial))
        for id in ids:
            self._due.pop(id, None)
        self._last = replace(last, seconds=NO_TIME, cost=None)
