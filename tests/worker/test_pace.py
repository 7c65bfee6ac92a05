"""How long a paced worker's rounds take, by a clock that sleeping moves."""

from dataclasses import replace

import pytest

from worker_service.config import Settings
from worker_service.engine.types import CostProfile, Row, StepResult
from worker_service.pace import Pace

COST = CostProfile(draft_s=0.25, verify_s=8.0, verify_slope_s=1.0, prefill_token_s=0.5, verify_token_s=0.125)
ALONE_S = 8.0 + 4 * (0.25 + 0.125)  # a round of one request with four drafts


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def paced(time: Time) -> Pace:
    return Pace(COST, clock=time, sleep=time.sleep)


def drafted(*drafts: int, prefilled: int = 0) -> StepResult:
    rows = [Row(str(place), 0, 0, drafted=drafts, prefilled=prefilled) for place, drafts in enumerate(drafts)]
    return StepResult(tuple(rows), 0, 0.0, 1.0, 0.0)


def test_a_round_that_is_done_early_ends_when_its_device_would_be_done() -> None:
    time = Time()
    _, ended = paced(time).hold(time.now, drafted(4))
    assert ended == time.now == 100 + ALONE_S


def test_a_round_costs_what_its_profile_says_of_its_requests() -> None:
    assert COST.step_s([4, 2], 3) == 8 + 1 + 4 * 0.25 + 6 * 0.125 + 3 * 0.5


def test_the_wait_counts_as_part_of_the_forward_pass() -> None:
    time = Time()
    result, _ = paced(time).hold(time.now, drafted(4))
    assert result.verify_s == 1.0 + ALONE_S


def test_a_late_round_is_made_up_for_by_those_that_follow() -> None:
    time, begun = Time(), 100.0
    pace = paced(time)
    time.now += ALONE_S + 5
    _, begun = pace.hold(begun, drafted(4))
    assert begun == 100 + ALONE_S + 5
    _, ended = pace.hold(begun, drafted(4))
    assert ended == 100 + 2 * ALONE_S


def test_a_round_after_an_idle_while_makes_up_for_nothing() -> None:
    time = Time()
    pace = paced(time)
    time.now += ALONE_S + 5
    pace.hold(100.0, drafted(4))
    time.now += 1
    begun = time.now
    _, ended = pace.hold(begun, drafted(4))
    assert ended == begun + ALONE_S


def test_a_round_that_ran_nothing_costs_nothing() -> None:
    time = Time()
    _, ended = paced(time).hold(time.now, StepResult((), 0, 0.0, 0.0, 0.0))
    assert ended == 100.0


def test_the_costs_that_are_told_are_those_of_the_pace() -> None:
    measured = CostProfile(1.0, 1.0, 1.0, 1.0, 1.0, offload_block_s=0.25)
    assert paced(Time()).profile(measured) == replace(COST, offload_block_s=0.25)


def test_a_round_after_an_empty_one_owes_nothing_of_the_time_before() -> None:
    time = Time()
    pace = paced(time)
    _, begun = pace.hold(time.now, StepResult((), 0, 0.0, 0.0, 0.0))
    _, ended = pace.hold(begun, drafted(4))
    assert ended == begun + ALONE_S


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_no_device_costs_that(seconds: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        Settings(model="any", pace=CostProfile(0.0, seconds, 0.0, 0.0, 0.0), _cli_parse_args=False)  # type: ignore[call-arg]
