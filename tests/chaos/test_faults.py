"""Schedules of faults: replayable, and of every kind."""

from tests.chaos.faults import WEIGHTS, schedule


def test_a_seed_gives_the_same_schedule_again_and_another_one_another() -> None:
    assert schedule(3, 200) == schedule(3, 200) != schedule(4, 200)


def test_a_schedule_of_a_thousand_has_every_kind() -> None:
    struck = {(fault.kind, fault.target) for fault in schedule(1, 1000)}
    assert struck == set(WEIGHTS)
    assert any(fault.together for fault in schedule(1, 20))
