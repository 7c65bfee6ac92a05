"""A policy that somebody else wrote may fail: its requests wait behind all others, and the log tells where."""

import math
import pickle

import pytest
from structlog.testing import capture_logs

from scheduler_service.core.policies import Gittins, policy_name
from scheduler_service.guarded import LAST, guarded
from tests.scheduler.builders import request
from tests.scheduler.own_policies import (
    ByNumpy,
    Fails,
    Final,
    Halves,
    NeverSure,
    NoLevels,
    NotPreemptiveNorOtherwise,
    TooManyLevels,
)
from tests.scheduler.test_policies import view

ROUND_S = 0.03


@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 5, 6])
def test_a_request_that_it_fails_for_goes_behind_all_others(prompt: int) -> None:
    policy = guarded(Fails())
    failed = [policy.claim(view(request=request("a", arrival, prompt=prompt)), ROUND_S) for arrival in (5.0, 6.0)]
    assert failed == [(1, LAST, 5.0), (1, LAST, 6.0)]
    assert policy.claim(view(request=request("b", 7.0, prompt=50)), ROUND_S) == (1, 0, 9.0)
    assert policy.perceives(view(request=request("c", 5.0, prompt=prompt))) is False


def test_more_levels_than_are_stored_are_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="from 1 to 16"):
        guarded(TooManyLevels())


def test_levels_that_fail_are_told_at_the_start() -> None:
    with pytest.raises(ValueError, match="its `levels` fail: ZeroDivisionError"):
        guarded(NoLevels())


def test_what_each_submission_asks_is_asked_once_at_the_start() -> None:
    with pytest.raises(ValueError, match="its `preemptive` fails: AttributeError"):
        guarded(NotPreemptiveNorOtherwise())
    with pytest.raises(ValueError, match="its `surest` fails: ZeroDivisionError"):
        guarded(NeverSure())


def test_numbers_of_numpy_become_those_that_the_store_can_write() -> None:
    claim = guarded(ByNumpy()).claim(view(request=request("a", 5.0, prompt=5)), ROUND_S)
    assert (claim, list(map(type, claim))) == ((1, 5, math.log(5.0)), [int, int, float])


def test_it_goes_to_another_process_as_it_is() -> None:
    there = pickle.loads(pickle.dumps(guarded(Fails(further=3))))
    assert there.claim(view(request=request("b", 7.0, prompt=50)), ROUND_S) == (1, 0, 12.0)
    assert there.claim(view(request=request("a", 5.0, prompt=1)), ROUND_S) == (1, LAST, 5.0)


def test_one_that_nothing_can_be_derived_from_is_told_at_the_start() -> None:
    with pytest.raises(ValueError, match="no class can be derived from it: TypeError: final"):
        guarded(Final())


def test_it_is_made_once() -> None:
    assert guarded(Halves(8.0)).further_s == 4.0


def test_it_is_otherwise_the_same_policy() -> None:
    policy = guarded(Fails(further=3))
    assert (policy.preemptive, policy.perceptive) == (True, True)
    assert policy.claim(view(request=request("b", 7.0, prompt=50)), ROUND_S) == (1, 0, 12.0)
    assert policy_name(policy) == "tests.scheduler.own_policies.Fails"
    assert guarded(ours := Gittins()) is ours


def test_each_kind_of_failure_is_logged_once_with_its_place() -> None:
    policy = guarded(Fails())
    with capture_logs() as lines:
        for number in range(9):
            policy.claim(view(request=request(str(number), float(number), prompt=4 + number % 3)), ROUND_S)
    failed, level, _ = lines
    assert (failed["log_level"], failed["event"], failed["policy"]) == ("error", "policy_failed", "Fails")
    assert failed["trace"][0] == "KeyError"
    assert "own_policies.py" in failed["trace"][-1]
    assert level["trace"] == ("a level that is not from 1 to its `levels`, 1",)
