"""Nudge-like swaps and a cap on slowdown, which only simulations run: who passes whom."""

import pytest

from scheduler_service.core.policies import make_policy
from scheduler_service.sim.capped import simulate_capped
from scheduler_service.sim.nudge import Nudge
from scheduler_service.sim.oracle import simulated_policy
from scheduler_service.sim.simulator import simulate
from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job
from tests.simulator.builders import SECOND, ends, job


def sized(id: str, arrival_s: float, tokens: int) -> Job:
    return job(id, arrival_s, tokens, predicted_output_tokens=tokens)


def order(jobs: list[Job], passes: int) -> str:
    found = ends(simulate(jobs, Nudge(passes), SimFleet(costs=SECOND)))
    return "".join(sorted(found, key=found.__getitem__))


BUSY = sized("a", 0.0, 10)  # runs while the others come


def test_a_small_request_passes_the_large_one_at_the_back_once() -> None:
    assert order([BUSY, sized("L", 1.0, 20), sized("s", 2.0, 2), sized("t", 3.0, 2)], 1) == "asLt"


def test_it_passes_one_only_and_none_of_its_own_size() -> None:
    assert order([BUSY, sized("K", 1.0, 20), sized("L", 2.0, 20), sized("s", 3.0, 2)], 1) == "aKsL"
    assert order([BUSY, sized("L", 1.0, 20), sized("s", 2.0, 11)], 1) == "aLs"


def test_of_those_that_come_at_once_a_small_one_passes_too() -> None:
    at_once = [sized(id, 1.0, tokens) for id, tokens in (("K", 20), ("L", 20), ("s", 2), ("t", 5))]
    assert order([BUSY, *at_once], 1) == "aKsLt"
    assert order([BUSY, *at_once], 4) == "astKL"


def test_who_runs_is_not_passed() -> None:
    assert order([sized("L", 0.0, 20), sized("s", 1.0, 2)], 1) == "Ls"


def test_with_more_passes_it_comes_near_to_shortest_job_first() -> None:
    jobs = [BUSY, sized("K", 1.0, 20), sized("L", 2.0, 20), sized("s", 3.0, 2), sized("t", 4.0, 5)]
    assert order(jobs, 4) == "astKL"
    assert order(jobs, 0) == "aKLst"


@pytest.mark.parametrize("setting", ["passes=-1", "passes", "passes=x", "seconds=1"])
def test_a_wrong_setting_is_refused(setting: str) -> None:
    with pytest.raises(ValueError, match="passes=N"):
        simulated_policy("nudge", [setting], [], 4)


def test_a_capped_slowdown_lets_a_long_request_go_before_later_short_ones() -> None:
    """It needs 20 s alone. Every second two short ones come, which would keep it waiting until they are all through."""
    jobs = [sized("L", 0.0, 20), *(sized(f"s{n:02}", 0.5 * n, 1) for n in range(1, 100))]
    policy, fleet = make_policy("srpt-length"), SimFleet(costs=SECOND)
    free = ends(simulate(jobs, policy, fleet))["L"]
    assert free > 100
    assert 30 < ends(simulate_capped(jobs, policy, fleet, 2))["L"] < 60
    assert ends(simulate_capped(jobs, policy, fleet, 1000))["L"] == free
