"""What one scheduler process has counted since it began to lead. Nothing here is stored, and nothing decides by it."""

from collections import Counter, deque
from collections.abc import Sequence

from protos.metrics import PER_STEP_S, Distribution
from scheduler_service.core.events import StepDone
from scheduler_service.core.lifecycle import State
from scheduler_service.core.types import Changed, Effect, Finish, counted_ids

MAX_TENANTS = 1024  # refusals are counted for so many tenants
MAX_DELAYS = 1024  # so many of the last commands count for the percentiles of report_to_command


class Counters:
    def __init__(self) -> None:
        self.submitted = self.refused = self.preemptions = 0
        self.repeated = 0  # of those that were submitted: another had the id, so they end without a word
        self.tokens = self.drafts = self.drafted = self.accepted = 0
        self.ended: Counter[State] = Counter()
        self.refused_by_tenant: Counter[str] = Counter()  # for lack of room or time
        self.refused_for: Counter[str] = Counter()  # requests of any kind, by the reason of the error that they got
        self.command_delays_s: deque[float] = deque(maxlen=MAX_DELAYS)  # from a report to the command that answers it
        self.report_to_command = Distribution(PER_STEP_S)  # the same, of all commands
        self.reports = self.commands = 0

    def refuse(self, tenant: str) -> None:
        """A request of this tenant was refused for lack of room or time."""
        self.refused += 1
        if tenant in self.refused_by_tenant or len(self.refused_by_tenant) < MAX_TENANTS:
            self.refused_by_tenant[tenant] += 1

    def commanded(self, delay_s: float) -> None:
        """A command was made so long after the report that it answers."""
        self.command_delays_s.append(delay_s)
        self.report_to_command.observe(delay_s)

    def step_done(self, step: StepDone, effects: Sequence[Effect]) -> None:
        """`effects`: what the core made of `step`. Rows without an effect were stale, and do not count."""
        self.reports += 1
        counted: set[str] = set()
        for effect in effects:
            counted.update(counted_ids(effect))
            self.preemptions += isinstance(effect, Changed) and effect.record.state is State.PAUSED
        rows = step.rounds
        if len(counted) < len(rows):
            rows = tuple(row for row in rows if row.id in counted)
        tokens = drafts = drafted = accepted = 0
        for row in rows:
            if row.finish is not Finish.ERROR:
                tokens += row.new
                drafts += sum(drafted > 0 for _, drafted, _ in row.each) if row.each else row.drafted > 0
                drafted += row.drafted
                accepted += row.accepted
        self.tokens += tokens
        self.drafts += drafts
        self.drafted += drafted
        self.accepted += accepted
