"""How much of drafting, and of the way to the drafter, is hidden behind passes: on a clock of the test's own."""

import pytest

from tests.worker.drafting.knowing import Known
from tests.worker.drafting.virtual import answer

PASS_S = 0.060


@pytest.mark.parametrize("rtt_ms", [1, 5, 10, 20])
def test_for_one_request_the_guesses_at_the_outcome_hide_more_than_half(rtt_ms: float) -> None:
    known = Known("", rtt_ms=rtt_ms)
    found = answer(known, PASS_S)
    assert found.hidden(known) > 0.55
    assert found.hits > 0.9 * found.rounds


def test_whose_guesses_are_always_right_hides_all() -> None:
    known = Known("", rtt_ms=5, right=1.0)
    assert answer(known, PASS_S).hidden(known) > 0.95


@pytest.mark.parametrize("rtt_ms", [5, 20])
def test_where_those_go_first_that_are_ready_nearly_all_is_hidden(rtt_ms: float) -> None:
    known = Known("", rtt_ms=rtt_ms)
    found = answer(known, PASS_S, requests=8, slots=4)
    assert found.hidden(known) > 0.9
    assert found.hits > 0.9 * found.rounds


def test_nothing_waits_for_a_drafter_that_is_too_far_away() -> None:
    known = Known("", rtt_ms=500)
    found = answer(known, PASS_S)
    assert found.waited_s == 0.0
