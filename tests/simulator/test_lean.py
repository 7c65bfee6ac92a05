"""The lean loop neither reports nor plans rounds that change nothing; nobody can tell from what comes of them."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.core.beliefs import Expected, Length
from scheduler_service.core.events import Event, StepDone
from scheduler_service.core.types import Bounds, Plan, RequestClass
from scheduler_service.predictor.online import OnlinePredictor
from scheduler_service.sim.costs import StepCosts
from scheduler_service.sim.generate import Synthetic, generate
from scheduler_service.sim.plain import Plain
from scheduler_service.sim.simulator import Outcome, Simulation
from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job
from tests.simulator.builders import NAMES, SECOND, job, policy

POLICIES = [
    *NAMES,
    "oracle",
    "nudge:passes=3",
    "gittins:overtaking=2",
    "gittins:overtaking=0",
    "gittins:opening=balanced",
    "gittins:blind=true",
    "gittins:ageing=0.5",
    "gittins:max-pause-s=9",
    "laps-sd:reading=adapted",
    "laps-sd:reading=adapted:overtaking=3",
    "laps-sd:window=3:epsilon=0.2:key=remaining:destination=stay",
]
COSTS = [SECOND, replace(SECOND, t_draft_ms=100.0, t_token_ms=10.0, t_prefill_ms_per_token=30.0, t_resume_ms=77.0)]
FLEETS = st.builds(
    SimFleet,
    slots=st.integers(1, 4),
    costs=st.sampled_from(COSTS),
    kv_budget_tokens=st.sampled_from([400, 900, 10**9, 10**12]),
    host_kv_tokens=st.sampled_from([0, 300]),
    prefill_chunk=st.sampled_from([16, 10**9]),
    draft_len=st.integers(0, 5),
)


@st.composite
def workloads(draw: st.DrawFn) -> list[Job]:
    """Few requests, with all that a workload may say of them."""
    rounds = st.lists(st.integers(0, 4), min_size=1, max_size=6).map(tuple)
    tenants = draw(st.sampled_from([[""], [""], ["", "other"]]))
    classes = draw(st.sampled_from([[RequestClass.DEFAULT], [RequestClass.DEFAULT], list(RequestClass)]))
    recorded = draw(st.booleans())
    expected = [None, Expected(Length(3.0, 0.5), 0.7), Expected(None, 0.2)]
    jobs = []
    for index in range(draw(st.integers(1, 8))):
        accepted = draw(rounds)
        drafted = tuple(draw(st.integers(most, 4)) for most in accepted) if recorded and draw(st.booleans()) else ()
        jobs.append(
            job(
                f"j{index}",
                draw(st.integers(0, 120)) / 2,
                draw(st.integers(1, 150)),
                accepted,
                drafted=drafted,
                prompt_tokens=draw(st.integers(1, 50)),
                predicted_output_tokens=draw(st.none() | st.integers(1, 200)),
                expected=draw(st.sampled_from(expected)),
                tenant=draw(st.sampled_from(tenants)),
                klass=draw(st.sampled_from(classes)),
            )
        )
    return jobs


@st.composite
def crowds(draw: st.DrawFn) -> tuple[list[Job], SimFleet]:
    """Many requests, as in the laboratory."""
    fleet = SimFleet(slots=draw(st.sampled_from([1, 2, 5, 8, 16, 32])), costs=StepCosts(t_resume_ms=1.5))
    what = Synthetic(
        requests=draw(st.integers(30, 120)),
        load=draw(st.sampled_from([0.7, 0.95, 1.3, math.inf])),
        arrival_cv=draw(st.sampled_from([1.0, 4.0])),
        output_mean=draw(st.sampled_from([5.0, 40.0, 200.0])),
        sigma=draw(st.sampled_from([0.0, 0.5, math.inf])),
        predicted=draw(st.booleans()),
        drift_rounds=draw(st.sampled_from([0.0, 8.0])),
    )
    return generate(what, draw(st.integers(0, 10**6)), fleet), fleet


def fared(simulation: Simulation) -> dict[str, Any]:
    """All that can be told of a simulation afterwards but the claims that requests had last: nobody needs those."""
    trace, fleet = simulation.trace, simulation.core.fleet

    def told(outcome: Outcome) -> Outcome:
        return replace(outcome, record=replace(outcome.record, level=0, key=0.0))

    return {
        "outcomes": list(map(told, trace.outcomes)),
        "gaps": sorted(trace.gaps_s),
        "levels": trace.levels,
        "counted": (trace.rounds, trace.drafts, [one.id for one in trace.refused]),
        "learned": (fleet.known.length, fleet.known.acceptance),
        "left": (fleet.load.by_class, fleet.load.pace),
    }


def assert_alike(leanly: Simulation, plainly: Simulation) -> None:
    """Names the first difference. A plain `assert` of the whole would be explained line by line, which takes hours."""
    expected = fared(plainly)
    for name, got in fared(leanly).items():
        wanted = expected[name]
        if got == wanted:
            continue
        if isinstance(got, list) and len(got) == len(wanted):
            got, wanted = next(pair for pair in zip(got, wanted, strict=True) if pair[0] != pair[1])
        pytest.fail(f"{name}: {str(got)[:2000]}, but planned {str(wanted)[:2000]}")


def alike(jobs: list[Job], name: str, fleet: SimFleet, **more: Any) -> None:
    leanly, plainly = (
        kind(jobs, policy(name, jobs, fleet.reference_draft), fleet, **more) for kind in (Simulation, Plain)
    )
    leanly.run()
    plainly.run()
    assert_alike(leanly, plainly)


@settings(max_examples=120, deadline=None)
@given(workloads(), st.sampled_from(POLICIES), FLEETS)
def test_all_comes_out_as_if_each_round_had_been_planned(jobs: list[Job], name: str, fleet: SimFleet) -> None:
    alike(jobs, name, fleet)


@settings(max_examples=20, deadline=None)
@given(crowds(), st.sampled_from(POLICIES))
def test_crowds_come_out_as_if_each_round_had_been_planned(crowd: tuple[list[Job], SimFleet], name: str) -> None:
    alike(crowd[0], name, crowd[1])


def test_what_was_foreseen_before_other_rounds_holds_no_longer() -> None:
    """The loop runs twice, and in between a request of another class ends and teaches that requests are longer."""
    batch = RequestClass.BATCH
    jobs = [
        job("first", 0.0, 1, drafted=(1,), prompt_tokens=1, predicted_output_tokens=1),
        job("early", 45.0, 1, prompt_tokens=1),
        job("long", 54.5, 125, (2, 0, 0, 0), drafted=(2, 0, 0, 0), prompt_tokens=1, predicted_output_tokens=1),
        job("one", 0.0, 134, (4, 0, 0), drafted=(4, 0, 2), prompt_tokens=1, predicted_output_tokens=160, klass=batch),
        job("two", 0.0, 88, (0, 0), drafted=(0, 0), prompt_tokens=1, klass=batch),
    ]
    alike(jobs, "gittins:overtaking=2", SimFleet(costs=SECOND, draft_len=4))


def test_a_newcomer_sees_how_long_others_have_run() -> None:
    """Where computing a prompt costs nothing, only the rounds after the first one tell that a request has begun."""
    expected = Expected(Length(3.0, 0.5), 0.7)
    jobs = [
        job("first", 0.0, 4),
        job("long", 15.0, 120, predicted_output_tokens=149),
        job("middle", 41.5, 107, tenant="other", expected=expected),
        job("short", 46.5, 2, tenant="other"),
    ]
    alike(jobs, "nudge:passes=3", SimFleet(costs=SECOND, draft_len=0))


def test_who_ran_when_the_loop_takes_over_keeps_the_claim_of_then() -> None:
    """A row is reckoned by what was known at its place in the report, and requests in later rows teach more."""
    fleet = SimFleet(slots=2, costs=StepCosts(t_resume_ms=1.5))
    what = Synthetic(requests=40, load=1.3, output_mean=40.0, predicted=False)
    alike(generate(what, 44, fleet), "gittins", fleet)


@pytest.mark.parametrize("name", ["gittins", "laps-sd:reading=adapted"])
def test_a_predictor_learns_the_same(name: str) -> None:
    fleet = SimFleet(slots=4)
    jobs = generate(Synthetic(requests=150, kind="mix", predicted=False), 3, fleet)
    runs = [kind(jobs, policy(name, jobs), fleet, predictor=OnlinePredictor()) for kind in (Simulation, Plain)]
    for run in runs:
        run.run()
    assert_alike(*runs)


def test_the_same_are_refused_where_work_is_bounded() -> None:
    fleet = SimFleet(slots=2)
    alike(generate(Synthetic(requests=200, load=2.0), 5, fleet), "gittins", fleet, bounds=Bounds(backlog_s=20.0))


@pytest.mark.parametrize("name", ["gittins", "laps-sd", "las"])
def test_a_simulation_may_be_looked_at_on_the_way(name: str) -> None:
    """Load and order at any time are those of the rounds that have ended by then."""
    fleet = SimFleet(slots=3)
    jobs = generate(Synthetic(requests=60), 2, fleet)
    seen: list[list[object]] = [[], []]
    for kind, views in zip((Simulation, Plain), seen, strict=True):
        simulation = kind([], policy(name, jobs), fleet, most_tokens=2048)
        for tenth in range(1200):
            for one in jobs:
                if tenth <= 10 * one.arrival_s < tenth + 1:
                    simulation.offer(one)
            simulation.advance((tenth + 1) / 10)
            core = simulation.core.fleet
            live = [(entry.emitted, entry.acceptance, entry.claim, entry.state) for entry in core.entries.values()]
            views.append((live, [key[-1] for key in core.workers["w0"].ranking], core.load.by_class, core.load.pace))
            views.append(repr(core.load.by_class))
    for leanly, plainly in zip(*seen, strict=True):
        assert leanly == plainly


def plans(jobs: list[Job], name: str, fleet: SimFleet) -> int:
    simulation = Simulation(jobs, policy(name, jobs), fleet)
    plan, made = simulation.core.plan, []

    def planning(worker: str) -> Plan:
        made.append(worker)
        return plan(worker)

    simulation.core.plan = planning  # type: ignore[method-assign]
    simulation.run()
    return len(made)


@pytest.mark.parametrize("name", ["fcfs", "srpt-length", "laps-sd", "las"])
def test_nothing_is_planned_where_memory_is_enough(name: str) -> None:
    fleet = SimFleet(slots=4)
    assert plans(generate(Synthetic(requests=100), 1, fleet), name, fleet) == 0


def test_it_is_planned_while_what_was_learned_changes_claims() -> None:
    fleet = SimFleet(slots=4)
    assert 0 < plans(generate(Synthetic(requests=100), 1, fleet), "gittins", fleet) < 200


def test_every_round_is_reported_to_who_asks_for_it() -> None:
    watching = Plain([job("a", 0.0, 50)], policy("fcfs", []), SimFleet(costs=SECOND))
    observe, reports = watching.core.observe, []

    def watched(event: Event, now: float) -> object:
        reports.append(isinstance(event, StepDone))
        return observe(event, now)

    watching.core.observe = watched  # type: ignore[assignment, method-assign]
    watching.run()
    assert sum(reports) == 50
