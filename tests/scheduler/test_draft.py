"""How many tokens each request drafts: what makes the batch fastest, and calmly so."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.core.core import Core
from scheduler_service.core.costs import CostProfile
from scheduler_service.core.draft import INERTIA, LONGEST, PROBE_ROUNDS, draft_lengths
from scheduler_service.core.events import Round, StepDone, Submitted, WorkerUp
from scheduler_service.core.policies import make_policy
from tests.scheduler.builders import request

CHEAP = CostProfile(draft_s=0.001, verify_s=1.0, verify_slope_s=0.0)
DEAR = CostProfile(draft_s=1.0, verify_s=1.0, verify_slope_s=0.0)
LOADED = CostProfile(draft_s=0.0, verify_s=0.01, verify_slope_s=0.2, verify_token_s=0.2)  # the device computes all day


def tokens_per_s(chances: list[float], lengths: tuple[int, ...], cost: CostProfile) -> float:
    tokens = sum(chance**j for chance, length in zip(chances, lengths, strict=True) for j in range(length + 1))
    return tokens / cost.step_s(lengths)


costs = st.builds(
    CostProfile,
    draft_s=st.floats(0, 1),
    verify_s=st.floats(0.01, 1),
    verify_slope_s=st.floats(0, 1),
    verify_token_s=st.floats(0, 1),
)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=3), costs)
def test_no_other_lengths_promise_markedly_more(chances: list[float], cost: CostProfile) -> None:
    chosen = tuple(draft_lengths(chances, [0] * len(chances), cost, longest=4))
    best = max(tokens_per_s(chances, lengths, cost) for lengths in product(range(5), repeat=len(chances)))
    assert best <= (1 + INERTIA) * tokens_per_s(chances, chosen, cost) * (1 + 1e-9)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=3), costs, st.integers(0, 4))
def test_lengths_once_chosen_stay_while_beliefs_do(chances: list[float], cost: CostProfile, last: int) -> None:
    chosen = draft_lengths(chances, [last] * len(chances), cost, longest=4)
    assert draft_lengths(chances, chosen, cost, longest=4) == chosen


def test_who_is_accepted_more_drafts_more_in_the_same_batch() -> None:
    poor, rich = draft_lengths([0.3, 0.9], [4, 4], CostProfile(0.01, 1.0, 0.1, verify_token_s=0.1), LONGEST)
    assert poor < rich


def test_nobody_drafts_when_speculation_does_not_pay() -> None:
    assert draft_lengths([0.5], [4], DEAR, LONGEST) == [0]
    assert draft_lengths([0.5] * 8, [4] * 8, LOADED, LONGEST) == [0] * 8


def test_drafts_that_cost_next_to_nothing_are_as_long_as_they_may_be() -> None:
    assert draft_lengths([0.9], [4], CHEAP, LONGEST) == [LONGEST]


def test_the_core_asks_for_no_more_than_the_longest_of_a_worker_that_could_draft_more() -> None:
    assert rounds(core_of(CHEAP, max_draft=64), accepted=1.0, count=30)[-1] == LONGEST


def test_a_worker_that_drafts_less_bounds_the_length() -> None:
    assert draft_lengths([0.9], [4], CHEAP, longest=2) == [2]


@pytest.mark.parametrize("chance", [0.7, 0.85])
def test_windows_lengthen_with_the_time_that_a_pass_spends_on_links(chance: float) -> None:
    found: list[int] = []
    for link_s in (0.0, 0.005, 0.02, 0.08):
        cost = CostProfile(0.001, 0.01 + link_s, verify_token_s=0.001)
        found += draft_lengths([chance], [4], cost, LONGEST)
    assert found == sorted(found)
    assert found[0] < found[-1] <= LONGEST
    assert found[-1] > 8 or chance < 0.8


def core_of(cost: CostProfile, max_draft: int = LONGEST) -> Core:
    """With one worker and one request there, which has prefilled."""
    core = Core(make_policy("fcfs"), draft_len=None)
    core.observe(WorkerUp("w", 4, 1000, 16, max_draft, cost, ()), 0.0)
    core.observe(Submitted(request("a")), 0.0)
    return core


def rounds(core: Core, accepted: float, count: int) -> list[int]:
    """The draft lengths of `count` rounds of decoding, of each of which that share is accepted."""
    lengths, emitted = [], 0
    for now in range(count):
        (run,) = core.plan("w").schedule
        hits = round(accepted * run.draft_len)
        row = Round("a", run.placement, emitted, hits + 1, run.draft_len, hits, 0 if now else 4, 0, 1)
        core.observe(StepDone("w", (row,), 1000, 1.0), float(now))
        emitted += row.new
        lengths.append(run.draft_len)
    return lengths


def test_the_core_plans_longer_drafts_for_a_request_that_is_accepted() -> None:
    cost = CostProfile(draft_s=0.1, verify_s=1.0)
    assert rounds(core_of(cost), accepted=1.0, count=30)[-1] > rounds(core_of(cost), accepted=0.0, count=30)[-1]


def test_a_request_that_does_not_draft_tries_a_token_now_and_then() -> None:
    lengths = rounds(core_of(DEAR), accepted=0.0, count=3 * PROBE_ROUNDS)
    assert set(lengths[1:]) == {0, 1}
    assert sum(lengths[PROBE_ROUNDS:]) == 2
