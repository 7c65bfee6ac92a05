"""What is believed of acceptance and length."""

import math
from random import Random
from statistics import NormalDist, fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.core.beliefs import LONG, MAX_WINDOW, Acceptance, FleetAcceptance, FleetLength, Forecast, Length
from scheduler_service.core.events import Submitted
from scheduler_service.core.types import Changed
from tests.scheduler.builders import core, request


def observed(*rounds: tuple[int, int]) -> Acceptance:
    belief = Acceptance()
    for drafted, accepted in rounds:
        belief = belief.after(drafted, accepted, accepted + 1)
    return belief


def test_acceptance_is_weighted_by_drafted_tokens() -> None:
    assert observed((4, 4), (1, 0), (3, 0)).mean == 0.5


def test_a_round_without_drafts_is_no_sample_but_counts_for_stability() -> None:
    before = observed((4, 2), (4, 2))
    after = before.after(0, 0, 1)
    assert after.mean == before.mean
    assert not before.stable(window=3, epsilon=0.1)
    assert after.stable(window=3, epsilon=0.1)


def test_a_mean_that_moves_is_not_stable() -> None:
    assert not observed((4, 4), (4, 0)).stable(window=2, epsilon=0.4)
    assert observed((4, 4), (4, 0)).stable(window=2, epsilon=0.5)


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 8))
def test_the_chance_of_a_draft_token_is_told_alike_by_short_and_by_long_drafts(one: int, other: int) -> None:
    """Accepted with 2 in 3 each: of three rounds with one draft two accept it; the mean would fall with the length."""
    chances = []
    for draft_len in (one, other):
        rng = Random(draft_len)
        rounds = [
            (draft_len, next((n for n in range(draft_len) if rng.random() > 2 / 3), draft_len)) for _ in range(9000)
        ]
        chances.append(observed(*rounds).chance(prior=0.5))
    assert chances == pytest.approx([2 / 3, 2 / 3], abs=0.03)


def test_drafts_that_the_end_of_the_output_cuts_are_not_rejected() -> None:
    assert observed((4, 4)).after(4, 2, new=2).rejected == 0
    assert observed((4, 4)).after(4, 2, new=3).rejected == 1


def test_a_round_without_drafts_says_nothing_of_the_chance() -> None:
    assert observed((4, 2), (0, 0)).chance(prior=0.9) == observed((4, 2)).chance(prior=0.9)


@given(st.lists(st.tuples(st.integers(0, 16), st.integers(0, 16)).map(lambda r: (max(r), min(r))), max_size=80))
def test_acceptance_stays_in_its_range_and_its_memory_bounded(rounds: list[tuple[int, int]]) -> None:
    belief = observed(*rounds)
    assert 0.0 <= belief.mean <= 1.0
    assert len(belief.means) == min(len(rounds), MAX_WINDOW)


def test_length_is_the_hint_else_the_fleets_mean_else_the_limit() -> None:
    length = FleetLength()
    assert length.predict(None, 100) == 100
    length.observe(10)
    length.observe(30)
    assert length.predict(None, 100) == 20
    assert length.predict(7, 100) == 7


def test_a_predicted_length_never_exceeds_the_limit() -> None:
    assert FleetLength(1, 500).predict(None, 100) == 100
    assert FleetLength().predict(500, 100) == 100


@settings(deadline=None)
@given(st.floats(1, 7), st.floats(0.2, 2), st.integers(0, 300), st.integers(1, 2000))
def test_what_is_left_is_the_mean_over_all_lengths_beyond_and_ends_at_the_bound(
    location: float, spread: float, emitted: int, more: int
) -> None:
    """Against equally likely lengths."""
    normal = NormalDist(location, spread)
    alive = 1 - normal.cdf(math.log(emitted)) if emitted else 1.0
    remaining = Forecast(Length(location, spread), emitted + more).remaining(emitted)
    assert 0 <= remaining <= more
    if alive > 1e-4:
        shares = (1 - alive * (i + 0.5) / 2000 for i in range(2000))
        drawn = fmean(min(math.exp(normal.inv_cdf(share)), emitted + more) - emitted for share in shares)
        assert remaining == pytest.approx(drawn, rel=0.03, abs=0.1)


def test_nothing_is_left_at_the_bound() -> None:
    assert Forecast(Length(9.0, 0.5), 64).remaining(64) == 0


@pytest.mark.parametrize("policy", ["default", "laps-sd", "srpt-length"])
@pytest.mark.parametrize(
    "ended", [[(22, 1), (24, 4000)], [(4_000_000_000, 1), (4_200_000_000, 4000)], [(24, 1), (22, 4000)]]
)
def test_no_hint_of_a_length_is_too_strange_whatever_earlier_ones_taught(
    policy: str, ended: list[tuple[int, int]]
) -> None:
    """A client says what it likes: a line through hints that lie close together leads anywhere."""
    queue = core(policy)
    for _ in range(1500):
        for hint, tokens in ended:
            queue.fleet.known.length.observe(tokens, hint)
    for hint in (1, 23, 1000, 2**32 - 1):
        for changes in queue.observe(Submitted(request(f"{hint}", predicted_tokens=hint)), 0.0):
            assert isinstance(changes, Changed)
            fresh = core(policy)
            fresh.fleet.known.length = queue.fleet.known.length
            fresh.restore([changes.record])
    assert len(queue.fleet.entries) == 4


def test_what_the_fleet_accepted_long_ago_counts_less() -> None:
    """Drafters and draft lengths change, and the service runs on."""
    fleet = FleetAcceptance.at(4)
    for _ in range(1000):
        fleet.observe(Acceptance(rounds=10_000, drafted=40_000, accepted=20_000, rejected=9_000))
    for _ in range(10 * LONG // 10_000):
        fleet.observe(Acceptance(rounds=10_000))
    assert fleet.accepted / fleet.rounds < 0.01


def test_a_fleet_that_has_not_drafted_for_very_long_knows_as_little_as_at_first() -> None:
    fleet = FleetAcceptance.at(4)
    for _ in range(100 * LONG // 10_000):
        fleet.observe(Acceptance(rounds=10_000))
    assert fleet.accepted + fleet.rejected == 0
    assert fleet.chance == 0.5


def test_more_output_than_was_allowed_leaves_nothing_to_come() -> None:
    """A faulty worker may report it, with a reading of what remains."""
    queue = core()
    queue.observe(Submitted(request("a", max_tokens=3)), 0.0)
    entry = queue.fleet.entries["a"]
    entry.emitted = 5
    entry.expect(Length(3.0, 0.5), since=5)
    assert entry.remaining_tokens == 0
