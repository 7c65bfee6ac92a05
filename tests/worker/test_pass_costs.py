"""What passes of known costs teach, and which drafts are verified by it."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_service.engine.pass_costs import PassCosts


def in_groups(rows: int) -> float:
    """Seconds of a pass that reads the weights once for eight rows."""
    return 0.01 + 0.01 * -(-rows // 8)


def learned(of: range, passes: int = 2000, noise: float = 0.0) -> PassCosts:
    costs, random = PassCosts(0.02, 0.0), Random(3)
    for _ in range(passes):
        rows = random.choice(of)
        costs.observe(rows, in_groups(rows) * random.uniform(1 - noise, 1 + noise), 0.0, 0.0)
    return costs


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_rows_that_fill_a_group_are_learned_to_be_free_and_the_next_one_to_be_dear(noise: float) -> None:
    costs = learned(range(1, 25), noise=noise)
    assert [costs.seconds(rows) for rows in range(1, 25)] == pytest.approx(
        [in_groups(rows) for rows in range(1, 25)], rel=0.05 + noise
    )


@given(st.lists(st.tuples(st.integers(1, 600), st.floats(1e-4, 10.0)), max_size=30))
def test_more_rows_are_never_taken_to_be_cheaper(passes: list[tuple[int, float]]) -> None:
    costs = PassCosts(0.02, 0.001)
    for rows, seconds in passes:
        costs.observe(rows, seconds, 0.0, 0.0)
    known = [costs.seconds(rows) for rows in range(1, 700)]
    assert all(0 < fewer <= more * (1 + 1e-12) for fewer, more in pairwise(known))


def test_what_makes_all_passes_slower_is_learned_for_those_that_were_not_seen_lately() -> None:
    costs = learned(range(1, 41))
    before = costs.seconds(40)
    for _ in range(200):
        costs.observe(4, 2 * in_groups(4), 0.0, 0.0)
    assert costs.seconds(4) == pytest.approx(2 * in_groups(4), rel=0.02)
    assert 1.3 * before < costs.seconds(40) < 2 * before


def test_one_pass_that_took_for_ever_hardly_counts() -> None:
    costs = learned(range(1, 25))
    before = costs.seconds(8)
    costs.observe(8, 100.0, 0.0, 0.0)
    assert costs.seconds(8) < 1.1 * before


@given(st.lists(st.floats(0.0, 1.0), max_size=24), st.integers(1, 16))
def test_those_drafts_are_verified_that_make_most_tokens_a_second(chances: list[float], rows: int) -> None:
    costs = learned(range(1, 41), passes=400)

    def rate(kept: list[float]) -> float:
        return (rows + sum(kept)) / costs.seconds(rows + len(kept))

    likeliest = sorted(chances, reverse=True)
    best = max((likeliest[:count] for count in range(len(chances) + 1)), key=rate)
    kept = likeliest[: costs.worth(chances, rows, rows)]
    if rate(best) <= 1.03 * rate([]) * (1 + 1e-9):
        assert not kept  # what is known of costs is not that exact
    else:
        assert rate(kept) >= rate(best) * (1 - 1e-9)


def test_now_and_then_all_drafts_are_verified_at_hardly_any_price_for_costs_may_have_changed() -> None:
    costs = PassCosts(0.02, 0.02)  # one more row is as dear as a pass of its own
    steps = [(costs.price(1, 1, 2), costs.worth([0.3, 0.1], 1, 1)) for _ in range(640)]
    assert steps.count(((0.03, 0.0), 2)) == 10
    assert sum(kept == 0 for _, kept in steps) == 630


def test_now_and_then_fewer_drafts_are_verified_than_pay_for_what_fewer_take_may_have_changed() -> None:
    costs = PassCosts(0.02, 0.0)
    kept = []
    for _ in range(64):
        costs.price(1, 1, 8)
        kept.append(costs.worth([0.9] * 8, 1, 1))
    assert sorted(kept) == [1, 2, 4, 4, *[8] * 60]


def test_rows_that_were_not_seen_lately_are_learned_from_few_passes() -> None:
    costs = PassCosts(0.02, 0.005)
    for _ in range(500):
        costs.observe(5, 0.04, 0.0, 0.0)
    for _ in range(6):
        costs.observe(2, 0.02, 0.0, 0.0)
    assert costs.seconds(2) == pytest.approx(0.02, rel=0.1)
    assert costs.seconds(5) == pytest.approx(0.04, rel=0.1)


def test_seconds_that_were_measured_count_until_passes_have_taught_better() -> None:
    costs = PassCosts(0.02, 0.001, {5: 0.04, 3: 0.03, 9: 0.03})
    assert [costs.seconds(rows) for rows in (1, 2, 3, 4, 5, 9, 19)] == pytest.approx(
        [0.02, 0.025, 0.03, 0.03, 0.03, 0.03, 0.04]  # 5 took longer than 9 by noise; beyond those measured as a line
    )


def test_of_very_many_drafts_no_more_are_tried_than_make_the_pass_twice_as_long() -> None:
    costs = PassCosts(0.02, 0.002)
    for _ in range(63):
        costs.price(64, 64, 512)
    assert costs.worth([0.9] * 512, 64, 64) in (72, 73)  # 137 rows take twice as long as 64


def test_rows_that_are_taken_to_be_too_dear_are_tried_until_they_are_known() -> None:
    costs = PassCosts(0.02, 0.02)
    for _ in range(3000):
        costs.price(1, 1, 4)
        kept = costs.worth([0.9] * 4, 1, 1)
        costs.observe(1 + kept, 0.02, 0.0, 0.0)
    costs.price(1, 1, 4)
    assert costs.worth([0.9] * 4, 1, 1) == 4


@pytest.mark.parametrize("noise", [0.1, 0.4])
@pytest.mark.parametrize("seen", [[4], [2, 4], [3, 4, 12]], ids=str)
def test_what_is_known_of_rows_that_are_not_seen_stays_whatever_the_noise(noise: float, seen: list[int]) -> None:
    costs, random = learned(range(1, 41)), Random(3)
    before = costs.seconds(40)
    for _ in range(5000):
        rows = random.choice(seen)
        costs.observe(rows, in_groups(rows) * random.uniform(1 - noise, 1 + noise), 0.0, 0.0)
    assert costs.seconds(40) == pytest.approx(before, rel=0.3)


def test_a_draft_is_priced_at_the_tokens_that_all_would_get_in_the_time_of_a_row() -> None:
    costs = PassCosts(0.02, 0.002)
    least, position = costs.price(tokens=4, rows=4, most=8)
    assert least == pytest.approx(0.002 * 4 / costs.seconds(4))
    assert position == 0  # nothing was drafted yet
    costs.observe(4, costs.seconds(4), draft_s=0.0, position_s=0.001)
    assert costs.price(4, 4, 8)[1] == pytest.approx(0.001 * 4 / costs.seconds(4))
    assert PassCosts(0.02, 0.0).price(1, 1, 8)[0] == 0.03  # hardly ever right is not worth the work
    assert PassCosts(0.02, 9.0).price(1, 1, 8)[0] == 0.9  # what was measured may be wrong
