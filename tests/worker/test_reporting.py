"""Which rounds wait for each other and share a row, and which are reported at once."""

from dataclasses import replace

import pytest

from protos.link.v1 import worker_link_pb2 as pb
from protos.v1 import types_pb2
from worker_service.engine.types import CostProfile, Finish, Logprob, Row, Skip
from worker_service.reporting import Report, Reporter, Seconds
from worker_service.wire import of_report

STEP_S, WITHIN_S = 0.25, 0.5


class Steps:
    """A reporter, and steps of a quarter of a second for it."""

    def __init__(self, within_s: float = WITHIN_S, most: int = 99) -> None:
        self.reports: list[Report] = []
        self.reporter = Reporter(self.reports.append, most)
        self._within_s, self._step = within_s, 0

    def run(self, *rows: Row, cost: CostProfile | None = None) -> None:
        self._step += 1
        seconds = Seconds(0.001, 0.002, 0.003, 0.004)
        last = Report(self._step, 10 + self._step, 100 - self._step, seconds=seconds, cost=cost)
        self.reporter.add(last, rows, self._step * STEP_S, STEP_S, self._within_s)

    def go_on(self, steps: int, *names: str) -> None:
        for _ in range(steps):
            self.run(*(row(name, self._step) for name in names))

    def reported(self, name: str) -> list[tuple[int, int]]:
        """The reports that tell of this request: after which step each came, and of how many rounds."""
        mine = [(each.step, rows) for each in self.reports for rows in each.rounds if rows[0].request_id == name]
        return [(step, sum(row.skipped is None for row in rows)) for step, rows in mine]


def row(name: str = "a", start: int = 1) -> Row:
    """One that merely goes on."""
    return Row(name, 1, start, tokens=(start,), drafted=2, accepted=1, blocks=start)


def test_every_round_is_reported_at_once_unless_a_command_lets_it_wait() -> None:
    steps = Steps(within_s=0)
    steps.go_on(3, "a")
    assert steps.reported("a") == [(1, 1), (2, 1), (3, 1)]
    assert not any(report.partial for report in steps.reports)


def test_rounds_that_merely_go_on_share_a_row_as_long_as_the_first_may_wait() -> None:
    steps = Steps()
    steps.go_on(7, "a")
    assert steps.reported("a") == [(1, 1), (4, 3), (7, 3)]  # at first it starts


def test_a_row_holds_at_most_so_many_rounds() -> None:
    steps = Steps(within_s=10, most=2)
    steps.go_on(5, "a")
    assert steps.reported("a") == [(1, 1), (3, 2), (5, 2)]


@pytest.mark.parametrize(
    "change",
    [{"finish": Finish.STOP}, {"skipped": Skip.NO_BLOCKS, "tokens": ()}, {"prefilled": 4}, {"placement": 2}],
    ids=lambda change: next(iter(change)),
)
def test_what_changes_a_request_is_reported_at_once_and_others_go_on_waiting(change: dict[str, object]) -> None:
    steps = Steps(within_s=10)
    steps.go_on(2, "a", "b")
    steps.run(replace(row("a", 2), **change), row("b", 2))  # type: ignore[arg-type]
    assert [step for step, _ in steps.reported("a")] == [1, 3]
    assert steps.reported("b") == [(1, 1)]
    assert steps.reports[-1].partial


def test_a_preemption_is_reported_at_once_with_the_rounds_before_it() -> None:
    steps = Steps(within_s=10)
    steps.go_on(3, "a", "b")
    steps.run(row("b", 3), row("c", 0))
    assert steps.reported("a") == [(1, 1), (4, 2)]
    (rows,) = [rows for rows in steps.reports[-1].rounds if rows[0].request_id == "a"]
    assert rows[-1] == Row("a", 1, 3, blocks=2, skipped=Skip.PREEMPTED)
    assert steps.reported("c") == [(4, 1)]
    assert steps.reported("b") == [(1, 1)]


def test_rounds_of_an_earlier_placement_are_not_mixed_with_those_of_the_next_one() -> None:
    """Between two steps its KV was given up, and it was admitted again with the output that was reported."""
    steps = Steps(within_s=10)
    steps.go_on(3, "a")
    steps.run(replace(row("a", 1), placement=2))
    (again,) = of_report(steps.reports[-1], 7, "s").rows
    assert (again.placement, again.start, list(again.tokens)) == (2, 1, [1])


def test_a_request_that_resumes_is_reported_at_once() -> None:
    steps = Steps(within_s=10)
    steps.go_on(1, "a")
    steps.go_on(1, "b")
    steps.go_on(1, "a")
    assert steps.reported("a") == [(1, 1), (2, 0), (3, 1)]


def test_before_it_waits_a_worker_reports_all_and_its_answer_comes_last() -> None:
    steps = Steps(within_s=10)
    steps.go_on(3, "a", "b")
    steps.reporter.answer(99, 50)
    assert (steps.reported("a"), steps.reported("b")) == ([(1, 1), (3, 2)], [(1, 1), (3, 2)])
    assert steps.reports[-1] == Report(3, 99, 50)


def test_a_row_of_several_rounds_tells_each_and_a_report_sums_up_its_steps() -> None:
    steps = Steps(within_s=10)
    steps.run(row())
    steps.run(
        replace(row(start=3), tokens=(3, 3), logprobs=(Logprob(-1.0), Logprob(-2.0))), cost=CostProfile(*[1.0] * 6)
    )
    last = Row("a", 1, 5, tokens=(8,), drafted=4, blocks=2, logprobs=(Logprob(-3.0),), finish=Finish.LENGTH)
    steps.run(last)
    report = of_report(steps.reports[1], 7, "s")
    assert (report.step, report.command_seq, report.free_blocks, report.partial) == (3, 13, 97, False)
    seconds = report.draft_s, report.verify_s, report.other_s, report.idle_s
    assert seconds == pytest.approx((0.002, 0.004, 0.006, 0.008))
    assert report.last_round_s == STEP_S
    assert report.cost.verify_s == 1
    (packed,) = report.rows
    assert (packed.start, list(packed.tokens), packed.drafted, packed.accepted) == (3, [3, 3, 8], 6, 1)
    assert list(packed.tokens_per_round) == [2, 1]
    assert list(packed.drafted_per_round) == [2, 4]
    assert list(packed.accepted_per_round) == [1, 0]
    assert [one.logprob for one in packed.logprobs.tokens] == [-1, -2, -3]
    assert (packed.blocks, packed.finish) == (2, types_pb2.FINISH_REASON_LENGTH)


def test_on_the_wire_a_preemption_is_no_round() -> None:
    steps = Steps(within_s=10)
    steps.go_on(2, "a")
    steps.go_on(1, "b")
    (mine,) = [one for one in of_report(steps.reports[-1], 7, "s").rows if one.request_id == "a"]
    assert (mine.skipped, list(mine.tokens_per_round), list(mine.tokens)) == (pb.SKIP_PREEMPTED, [1], [1])


def test_a_single_round_has_no_figures_by_round() -> None:
    steps = Steps()
    steps.run(row())
    (single,) = of_report(steps.reports[0], 7, "s").rows
    assert not single.tokens_per_round
