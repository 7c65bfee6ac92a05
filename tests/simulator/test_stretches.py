"""Rounds in which those that run just go on are simulated at once; nobody can tell from what comes of them."""

from dataclasses import replace
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.core.types import Plan
from scheduler_service.sim import worker
from scheduler_service.sim.simulator import Outcome, Simulation, Trace, simulate
from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job
from tests.simulator.builders import NAMES, SECOND, job, policy

POLICIES = st.sampled_from(
    [*NAMES, "oracle", "gittins:overtaking=2", "gittins:max-pause-s=9", "laps-sd:reading=adapted"]
)
FLEETS = st.builds(
    SimFleet,
    slots=st.integers(1, 3),
    costs=st.sampled_from([SECOND, replace(SECOND, t_draft_ms=100.0, t_token_ms=10.0, t_prefill_ms_per_token=30.0)]),
    kv_budget_tokens=st.sampled_from([400, 10**9]),
    draft_len=st.integers(0, 4),
)


@st.composite
def workloads(draw: st.DrawFn) -> list[Job]:
    rounds = st.lists(st.integers(0, 4), min_size=1, max_size=6).map(tuple)
    tenants = draw(st.sampled_from([[""], ["", "other"]]))
    return [
        job(
            f"j{index}",
            draw(st.integers(0, 120)) / 2,
            draw(st.integers(1, 150)),
            draw(rounds),
            prompt_tokens=draw(st.integers(1, 50)),
            predicted_output_tokens=draw(st.none() | st.integers(1, 200)),
            tenant=draw(st.sampled_from(tenants)),
        )
        for index in range(draw(st.integers(1, 8)))
    ]


def told(outcome: Outcome) -> Outcome:
    """Without the claim that its request had last: nobody needs one of a request that has ended."""
    return replace(outcome, record=replace(outcome.record, level=0, key=0.0))


def one_by_one(jobs: list[Job], name: str, fleet: SimFleet) -> Trace:
    with patch.object(worker, "LONGEST_STRETCH", 1):
        return simulate(jobs, policy(name, jobs, fleet.reference_draft), fleet)


@settings(max_examples=300, deadline=None)
@given(workloads(), POLICIES, FLEETS)
def test_all_comes_out_as_if_each_round_had_been_planned(jobs: list[Job], name: str, fleet: SimFleet) -> None:
    at_once = simulate(jobs, policy(name, jobs, fleet.reference_draft), fleet)
    singly = one_by_one(jobs, name, fleet)
    assert list(map(told, at_once.outcomes)) == list(map(told, singly.outcomes))
    assert (at_once.rounds, at_once.drafts, at_once.gaps_s) == (singly.rounds, singly.drafts, singly.gaps_s)
    assert at_once.levels == singly.levels


def plans(jobs: list[Job], name: str, fleet: SimFleet) -> int:
    simulation = Simulation(jobs, policy(name, jobs), fleet)
    plan, made = simulation.core.plan, []

    def planning(worker: str) -> Plan:
        made.append(worker)
        return plan(worker)

    simulation.core.plan = planning  # type: ignore[method-assign]
    simulation.run()
    return len(made)


def test_a_request_that_nobody_can_overtake_needs_hardly_a_plan() -> None:
    assert plans([job("a", 0.0, 200), job("b", 0.0, 200)], "fcfs", SimFleet(costs=SECOND)) < 20


def test_requests_that_take_turns_are_planned_round_by_round() -> None:
    assert plans([job("a", 0.0, 100), job("b", 0.0, 100)], "las", SimFleet(costs=SECOND)) >= 200
