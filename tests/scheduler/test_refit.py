"""Which requests hear of what finished ones have taught, and when."""

import pytest

from scheduler_service.core.beliefs import Acceptance, FleetAcceptance, FleetLength
from scheduler_service.core.costs import CostProfile
from scheduler_service.core.events import Submitted
from scheduler_service.core.refit import AT_ONCE, Refit
from tests.scheduler.builders import core, records, request, worker_up


def ended(refit: Refit, length: FleetLength, acceptance: FleetAcceptance, tokens: int, accepted: int = 2) -> None:
    length.observe(tokens)
    acceptance.observe(Acceptance(10, 40, 10 * accepted, 10))
    refit.learned(length, acceptance)


def told(refit: Refit) -> list[str]:
    """Until nobody is due any more."""
    return [id for ids in iter(refit.due, []) for id in ids]


def taught(*ids: str) -> tuple[Refit, FleetLength, FleetAcceptance]:
    """Thousands have finished with 100 tokens, and everybody knows."""
    refit, length, acceptance = Refit(), FleetLength(), FleetAcceptance.at(4)
    for id in ids:
        refit.join(id)
    for _ in range(5000):
        ended(refit, length, acceptance, 100)
        told(refit)
    return refit, length, acceptance


def test_a_lesson_is_told_to_a_few_at_a_time_and_once_to_each() -> None:
    refit, ids = Refit(), [f"r{i}" for i in range(3 * AT_ONCE + 1)]
    for id in ids:
        refit.join(id)
    assert refit.due() == []
    ended(refit, FleetLength(), FleetAcceptance.at(4), 7)
    assert refit.due() == ids[:AT_ONCE]
    assert told(refit) == ids[AT_ONCE:]


def test_who_was_told_longest_ago_is_told_first() -> None:
    refit, length, acceptance = Refit(), FleetLength(), FleetAcceptance.at(4)
    for id in (ids := [f"r{i}" for i in range(2 * AT_ONCE)]):
        refit.join(id)
    ended(refit, length, acceptance, 7)
    refit.due()
    ended(refit, length, acceptance, 7000)
    assert told(refit) == [*ids[AT_ONCE:], *ids[:AT_ONCE]]


def test_what_confirms_the_belief_is_told_to_nobody() -> None:
    refit, length, acceptance = taught("a")
    for _ in range(1000):
        ended(refit, length, acceptance, 100)
    assert refit.due() == []


def test_lengths_that_change_are_told() -> None:
    refit, length, acceptance = taught("a")
    for _ in range(1000):
        ended(refit, length, acceptance, 400)
    assert refit.due() == ["a"]


def test_acceptance_that_changes_is_told() -> None:
    refit, length, acceptance = taught("a")
    for _ in range(5000):
        ended(refit, length, acceptance, 100, accepted=4)
    assert refit.due() == ["a"]


def test_who_has_left_is_not_told() -> None:
    refit, length, acceptance = Refit(), FleetLength(), FleetAcceptance.at(4)
    refit.join("gone")
    refit.join("here")
    ended(refit, length, acceptance, 7)
    refit.leave("gone")
    assert told(refit) == ["here"]


def test_drafts_that_change_are_told_though_as_many_are_accepted() -> None:
    refit, length, acceptance = taught("a")
    for _ in range(5000):
        length.observe(100)
        acceptance.observe(Acceptance(10, 80, 20, 10))
        refit.learned(length, acceptance)
    assert refit.due() == ["a"]


def test_the_first_answer_of_another_model_is_a_lesson_again() -> None:
    refit, _, acceptance = taught("a")
    refit.forget()
    ended(refit, FleetLength(), acceptance, 900)
    assert told(refit) == ["a"]


@pytest.mark.parametrize("policy", ["gittins:opening=balanced", "laps-sd", "srpt-length", "sjf", "las"])
@pytest.mark.parametrize("hint", [None, 90])
def test_after_a_change_of_leaders_claims_are_made_of_the_same_costs_as_before(policy: str, hint: int | None) -> None:
    """The second leader restores before a worker comes: by the default costs what was old went behind newcomers."""
    name, *more = policy.split(":")
    first, second = core(name, *more), core(name, *more)
    up = worker_up(slots=2, cost=CostProfile(draft_s=0.001, verify_s=0.03, verify_slope_s=0.01, prefill_token_s=0.002))
    first.observe(up, 0.0)
    for number in range(3 * AT_ONCE):
        asked = request(f"r{number:02}", float(number), prompt=10 * number + 4, predicted_tokens=hint)
        first.observe(Submitted(asked), float(number))
    second.restore(records(first))
    second.observe(up, 100.0)
    for _ in range(3):
        second.plan("w")
    assert {id: entry.claim for id, entry in second.fleet.entries.items()} == {
        id: entry.claim for id, entry in first.fleet.entries.items()
    }


def test_when_costs_come_a_few_requests_at_a_time_get_new_claims_whatever_they_learn() -> None:
    refit, ids = Refit(), [f"r{i}" for i in range(AT_ONCE + 3)]
    refit.costs_came(ids)
    refit.leave("r0")
    assert refit.pending
    assert refit.costless() == ids[1 : AT_ONCE + 1]
    assert refit.costless() == ids[AT_ONCE + 1 :]
    assert not refit.pending
