"""Which steps wait for each other and share a report, and which are reported at once."""

from dataclasses import replace

import pytest

from protos.v1 import types_pb2
from worker_service.engine.types import CostProfile, Finish, Logprob, Row, Skip, StepResult
from worker_service.reporting import Report, Reporter
from worker_service.wire import of_report

STEP_S, WITHIN_S = 0.25, 0.5


class Steps:
    """A reporter, and steps of a quarter of a second for it. `reported`: the numbers of the steps in each report."""

    def __init__(self, within_s: float = WITHIN_S, most: int = 99) -> None:
        self.reports: list[Report] = []
        self.reporter = Reporter(self.reports.append, most)
        self._within_s, self._step = within_s, 0

    def run(self, *rows: Row, cost: CostProfile | None = None) -> None:
        self._step += 1
        result = StepResult(rows, 7 - self._step, 0.001, 0.002, 0.0)
        report = Report(self._step, 10 + self._step, [result], 0.003, 0.004, cost)
        self.reporter.add(report, self._step * STEP_S, STEP_S, self._within_s)

    @property
    def reported(self) -> list[list[int]]:
        return [[7 - result.free_blocks for result in report.results] for report in self.reports]


def row(name: str = "a", start: int = 1) -> Row:
    """One that merely goes on."""
    return Row(name, 1, start, tokens=(start, start), drafted=2, accepted=1, blocks=start)


def test_every_step_is_reported_by_itself_unless_a_command_allows_more() -> None:
    steps = Steps(within_s=0)
    for start in (1, 3, 5):
        steps.run(row(start=start))
    assert steps.reported == [[1], [2], [3]]


def test_steps_that_merely_go_on_share_a_report_as_long_as_the_first_may_wait() -> None:
    steps = Steps()
    for start in range(1, 15, 2):
        steps.run(row(start=start))
    # The first one brings a request that did not run before; then three share a report.
    assert steps.reported == [[1], [2, 3, 4], [5, 6, 7]]


def test_a_report_holds_at_most_so_many_steps() -> None:
    steps = Steps(within_s=10, most=2)
    for start in range(1, 11, 2):
        steps.run(row(start=start))
    assert steps.reported == [[1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    "change",
    [
        {"finish": Finish.STOP},
        {"skipped": Skip.NO_BLOCKS, "tokens": ()},
        {"prefilled": 4},
        {"start": 0},
        {"placement": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_a_request_is_reported_at_once_with_the_steps_before_it(change: dict[str, object]) -> None:
    steps = Steps()
    steps.run(row())
    steps.run(row(start=3))
    steps.run(replace(row(start=5), **change))  # type: ignore[arg-type]
    assert steps.reported[-1][-1] == 3
    assert [step for report in steps.reported for step in report] == [1, 2, 3]


def test_a_preemption_is_reported_at_once_and_not_mixed_with_the_steps_before_it() -> None:
    steps = Steps()
    steps.run(row("a"), row("b"))
    steps.run(row("a", 3), row("b", 3))
    steps.run(row("a", 5), row("c", 3))
    assert steps.reported == [[1], [2], [3]]


def test_a_report_of_several_steps_tells_each_round_and_sums_the_times() -> None:
    steps = Steps()
    steps.run(row())
    steps.run(replace(row(start=3), logprobs=(Logprob(-1.0), Logprob(-2.0))), cost=CostProfile(1, 1, 1, 1, 1))
    last = Row("a", 1, 5, tokens=(8,), drafted=4, blocks=2, logprobs=(Logprob(-3.0),), finish=Finish.LENGTH)
    steps.run(last)
    report = of_report(steps.reports[1], 7, "s")
    assert (report.step, report.command_seq, report.free_blocks) == (3, 13, 4)
    seconds = (report.draft_s, report.verify_s, report.other_s, report.idle_s)
    assert seconds == pytest.approx((0.002, 0.004, 0.006, 0.008))
    assert report.cost.verify_s == 1
    (packed,) = report.rows
    assert (packed.start, list(packed.tokens), packed.drafted, packed.accepted) == (3, [3, 3, 8], 6, 1)
    assert list(packed.tokens_per_round) == [2, 1]
    assert list(packed.drafted_per_round) == [2, 4]
    assert list(packed.accepted_per_round) == [1, 0]
    assert [one.logprob for one in packed.logprobs.tokens] == [-1, -2, -3]
    assert (packed.blocks, packed.finish) == (2, types_pb2.FINISH_REASON_LENGTH)


def test_a_report_of_one_step_has_no_figures_by_round() -> None:
    steps = Steps()
    steps.run(row())
    (single,) = of_report(steps.reports[0], 7, "s").rows
    assert not single.tokens_per_round
