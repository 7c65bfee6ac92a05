"""The cost profile that every round corrects, on rounds of known costs."""

from collections.abc import Iterator
from dataclasses import astuple, replace
from random import Random

import pytest

from worker_service.engine.cost_model import TELL_STEPS, CostModel
from worker_service.engine.types import CostProfile, Finish, Row, StepResult

MEASURED = CostProfile(
    draft_s=0.002,
    verify_s=0.02,
    verify_slope_s=0.003,
    prefill_token_s=0.0005,
    verify_token_s=0.0004,
    offload_block_s=0.001,
)
CHANGED = CostProfile(
    draft_s=0.004,
    verify_s=0.03,
    verify_slope_s=0.001,
    prefill_token_s=0.0002,
    verify_token_s=0.001,
    offload_block_s=0.001,
)


def a_round(cost: CostProfile, batch: int, drafts: int, prefilled: int = 0, times: float = 1.0) -> StepResult:
    """Of `batch` requests that each draft so much, but the first one where it computes its prompt."""
    rows = tuple(
        Row(str(i), 1, 0, drafted=0 if prefilled and not i else drafts, prefilled=0 if i else prefilled, tokens=(1,))
        for i in range(batch)
    )
    drafted = [row.drafted for row in rows]
    verify_s = cost.verify_s + cost.verify_slope_s * (batch - 1) + cost.verify_token_s * sum(drafted)
    other_s = cost.prefill_token_s * prefilled
    return StepResult(
        rows, 9, times * max(drafted) * cost.draft_s, times * verify_s, times * other_s, positions=max(drafted)
    )


def rounds(cost: CostProfile, count: int, noise: float = 0.0) -> Iterator[StepResult]:
    """As various as those of a service. `noise`: they take longer now and then, by so much in the mean."""
    random = Random(3)
    for _ in range(count):
        shape = random.randint(1, 8), random.choice([0, 2, 4, 6]), random.choice([0, 0, 0, 64, 256])
        yield a_round(cost, *shape, times=1 + random.expovariate(1 / noise) if noise else 1.0)


def after(results: Iterator[StepResult]) -> CostProfile:
    model = CostModel(MEASURED)
    for result in results:
        model.observe(result)
    return model.profile


def test_changed_costs_are_found_within_some_rounds() -> None:
    assert astuple(after(rounds(CHANGED, 4 * TELL_STEPS))) == pytest.approx(astuple(CHANGED), rel=0.07)


def test_a_busy_machine_is_followed_in_the_mean() -> None:
    found = after(rounds(CHANGED, 10 * TELL_STEPS, noise=0.1))
    assert found.verify_s == pytest.approx(1.1 * CHANGED.verify_s, rel=0.1)
    assert found.draft_s == pytest.approx(1.1 * CHANGED.draft_s, rel=0.1)


def test_a_single_stall_changes_nothing() -> None:
    quiet = [*rounds(MEASURED, 3 * TELL_STEPS)]
    for at in (0, TELL_STEPS, 3 * TELL_STEPS - 1):
        stalled = [*quiet[:at], a_round(MEASURED, 4, 4, times=200.0), *quiet[at + 1 :]]
        assert astuple(after(iter(stalled))) == pytest.approx(astuple(MEASURED), rel=0.05)


def test_what_rounds_of_one_shape_cannot_tell_apart_changes_in_proportion() -> None:
    """Nothing but batches of four with four drafts each, half as fast as at warm-up."""
    cost = after(a_round(MEASURED, 4, 4, times=2.0) for _ in range(40 * TELL_STEPS))
    round_s = 4 * cost.draft_s + cost.verify_s + 3 * cost.verify_slope_s + 16 * cost.verify_token_s
    assert round_s == pytest.approx(2 * (4 * 0.002 + 0.02 + 3 * 0.003 + 16 * 0.0004), rel=0.01)
    assert cost.verify_s > MEASURED.verify_s
    assert cost.verify_token_s > MEASURED.verify_token_s
    assert cost.prefill_token_s == MEASURED.prefill_token_s


def test_no_cost_is_ever_negative() -> None:
    """A larger batch takes less time here, which no sum of costs can explain."""
    model = CostModel(MEASURED)
    for i in range(20 * TELL_STEPS):
        batch = 1 + i % 8
        model.observe(a_round(replace(MEASURED, verify_slope_s=-0.002), batch, 0))
        assert min(astuple(model.profile)) >= 0
    assert model.profile.verify_slope_s == 0


def test_a_cost_that_was_measured_as_nothing_can_grow() -> None:
    model = CostModel(replace(MEASURED, verify_token_s=0.0))
    for result in rounds(MEASURED, 4 * TELL_STEPS):
        model.observe(result)
    assert model.profile.verify_token_s == pytest.approx(MEASURED.verify_token_s, rel=0.1)


def test_it_is_told_only_when_it_has_changed() -> None:
    model = CostModel(MEASURED)
    assert not any(model.observe(result) for result in rounds(MEASURED, 3 * TELL_STEPS))
    told = [model.observe(result) for result in rounds(CHANGED, 30 * TELL_STEPS)]
    assert any(told[: 3 * TELL_STEPS])
    assert not any(told[10 * TELL_STEPS :])


def test_a_round_that_got_nowhere_teaches_nothing() -> None:
    model = CostModel(MEASURED)
    for _ in range(2 * TELL_STEPS):
        assert model.observe(StepResult((), 9, 0.0, 5.0, 5.0)) is None
    assert model.profile == MEASURED


def test_requests_that_ended_without_being_computed_teach_nothing_of_passes() -> None:
    model = CostModel(MEASURED)
    ended = StepResult(tuple(Row(str(i), 1, 0, finish=Finish.ERROR) for i in range(8)), 9, 0.0, 0.0, 0.001)
    for _ in range(2 * TELL_STEPS):
        assert model.observe(ended) is None
    assert model.passes.seconds(8) == CostModel(MEASURED).passes.seconds(8)
    together = replace(a_round(MEASURED, 1, 0), rows=(*a_round(MEASURED, 1, 0).rows, *ended.rows))
    for _ in range(2 * TELL_STEPS):
        model.observe(together)
    assert model.passes.seconds(1) == pytest.approx(MEASURED.verify_s, rel=0.01)


def test_drafts_beside_those_of_the_longest_chain_are_paid_for_too() -> None:
    model = CostModel(MEASURED)
    for i in range(400):
        drafts, branched = (i % 4, 3 * (i % 4)) if i % 2 else (i % 5, 0)
        seconds = CHANGED.verify_s + CHANGED.verify_token_s * (drafts + branched)
        model.observe(
            StepResult((Row("a", 1, 0, (1,), drafts, branched=branched),), 9, 0.0, seconds, 0.0, positions=drafts)
        )
    assert model.profile.verify_token_s == pytest.approx(CHANGED.verify_token_s, rel=0.05)
    assert model.passes.seconds(13) == pytest.approx(CHANGED.verify_s + 12 * CHANGED.verify_token_s, rel=0.1)
