"""Laws of a simulation under every policy; hypothesis draws the workloads."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import ParamSpec, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.core.policies import Claim, Fcfs, Policy, make_policy
from scheduler_service.core.types import Plan, View
from scheduler_service.predictor.online import OnlinePredictor
from scheduler_service.sim.generate import Synthetic, generate
from scheduler_service.sim.oracle import Oracle
from scheduler_service.sim.plain import Plain
from scheduler_service.sim.results import summarise
from scheduler_service.sim.simulator import Simulation, Trace, simulate
from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job
from tests.scheduler.builders import Seen
from tests.simulator.builders import NAMES, SECOND, ends, job, policy, run

P = ParamSpec("P")
T = TypeVar("T")
SLOTS = st.integers(1, 3)
POLICIES = st.sampled_from([*NAMES, "oracle"])
FLEETS = st.fixed_dictionaries(
    {
        "slots": SLOTS,
        "workers": st.integers(1, 2),
        "plan_lag": st.integers(0, 1),
        "draft_len": st.integers(0, 4),
        "kv_budget_tokens": st.sampled_from([200, 10**9]),
        "prefill_chunk": st.sampled_from([7, 10**9]),
    }
)


@st.composite
def workloads(draw: st.DrawFn, longest_prompt: int = 50) -> list[Job]:
    accepted = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple)
    size = draw(st.integers(1, 12))
    return [
        job(
            f"j{index}",
            draw(st.integers(0, 40)) / 2,
            draw(st.integers(1, 60)),
            draw(accepted),
            prompt_tokens=draw(st.integers(1, longest_prompt)),
            predicted_output_tokens=draw(st.none() | st.integers(1, 90)),
        )
        for index in range(size)
    ]


@settings(max_examples=150, deadline=None)
@given(workloads(), st.sampled_from(["fcfs", "sjf"]), SLOTS, st.integers(1, 3), st.integers(0, 1))
def test_nobody_is_paused_without_preemption(jobs: list[Job], name: str, slots: int, workers: int, lag: int) -> None:
    trace = run(jobs, name, slots=slots, workers=workers, plan_lag=lag)
    assert [outcome.job.id for outcome in trace.outcomes if outcome.record.preemptions] == []


@settings(max_examples=150, deadline=None)
@given(workloads(), POLICIES, FLEETS)
def test_every_job_ends_once_with_all_its_tokens(jobs: list[Job], name: str, fleet: dict[str, int]) -> None:
    outcomes = run(jobs, name, **fleet).outcomes
    assert sorted(outcome.job.id for outcome in outcomes) == sorted(job.id for job in jobs)
    assert all(outcome.record.emitted == outcome.job.output_tokens for outcome in outcomes)


@settings(max_examples=100, deadline=None)
@given(
    workloads(longest_prompt=200), POLICIES, st.integers(0, 30), st.sampled_from([1, 7, 64]), st.integers(0, 1), SLOTS
)
def test_every_job_ends_when_memory_is_as_short_as_it_can_be(
    jobs: list[Job], name: str, to_spare: int, chunk: int, lag: int, slots: int
) -> None:
    """Nobody's prompt is computed over and over: some plans for each token are enough."""
    largest = max(job.prompt_tokens + job.output_tokens + 2 * (4 + 1) for job in jobs)
    fleet = SimFleet(slots, costs=SECOND, kv_budget_tokens=largest + to_spare, plan_lag=lag, prefill_chunk=chunk)
    simulation = Simulation(jobs, policy(name, jobs), fleet)
    plans = count(1)
    most = 50 * sum(job.prompt_tokens + job.output_tokens for job in jobs) + 1000
    plan = simulation.core.plan

    def planning(worker: str) -> Plan:
        assert next(plans) < most, "it goes on for ever"
        return plan(worker)

    simulation.core.plan = planning  # type: ignore[method-assign]
    assert len(simulation.run().outcomes) == len(jobs)


@settings(max_examples=60, deadline=None)
@given(workloads(), POLICIES, FLEETS)
def test_equal_inputs_give_equal_simulations(jobs: list[Job], name: str, fleet: dict[str, int]) -> None:
    first, second = run(jobs, name, **fleet), run(jobs, name, **fleet)
    assert first == second


@settings(max_examples=60, deadline=None)
@given(workloads(), POLICIES)
def test_one_slot_is_never_idle_while_work_waits(jobs: list[Job], name: str) -> None:
    """The last end is the same under every policy: that of the busy periods' work, served without a pause."""
    now = 0.0
    for one in sorted(jobs, key=lambda job: job.arrival_s):
        now = max(now, one.arrival_s) + one.rounds(4)
    assert max(ends(run(jobs, name)).values()) == now


class Peeked(Exception):
    """Somebody asked for the truth."""


class Seal:
    """Whether who must not know the truth is at work at this moment."""

    closed = False


def sealing(work: Callable[P, T]) -> Callable[P, T]:
    def sealed(*args: P.args, **kwargs: P.kwargs) -> T:
        before, Seal.closed = Seal.closed, True
        try:
            return work(*args, **kwargs)
        finally:
            Seal.closed = before

    return sealed


class Sealed(Job):
    """Tells the truth to the worker, and to nobody while the core or a predictor is at work or is told of it."""

    request = sealing(Job.request)
    features = sealing(Job.features)

    def __getattribute__(self, name: str) -> object:
        if Seal.closed and name in ("output_tokens", "accepted", "rounds", "accepts"):
            raise Peeked(name)
        return super().__getattribute__(name)


def simulate_sealed(jobs: list[Job], policy: Policy, fleet: SimFleet) -> Trace:
    predictor = OnlinePredictor()
    predictor.predict = sealing(predictor.predict)  # type: ignore[method-assign]
    simulation = Plain(jobs, policy, fleet, predictor=predictor)
    core = simulation.core
    core.observe, core.plan = sealing(core.observe), sealing(core.plan)  # type: ignore[method-assign]
    return simulation.run()


@settings(max_examples=80, deadline=None)
@given(workloads(), st.sampled_from(NAMES), FLEETS)
def test_a_policy_never_sees_the_true_length(jobs: list[Job], name: str, fleet: dict[str, int]) -> None:
    sealed: list[Job] = [Sealed(**vars(job)) for job in jobs]
    trace = simulate_sealed(sealed, make_policy(name), SimFleet(costs=SECOND, **fleet))
    assert len(trace.outcomes) == len(jobs)


def test_the_oracle_alone_does_see_it() -> None:
    sealed: list[Job] = [Sealed(**vars(job("j")))]
    with pytest.raises(Peeked):
        simulate_sealed(sealed, Oracle(lambda id: sealed[0].rounds(4)), SimFleet(costs=SECOND))


def test_nothing_that_a_policy_is_given_depends_on_the_true_length_of_what_did_not_run() -> None:
    """Two workloads that differ only in the output of a job that waits give equal claims while it waits."""
    seen: list[list[Seen]] = []
    for tokens in (3, 50):
        views: list[Seen] = []
        jobs = [job("first", tokens=60), job("waits", tokens=tokens)]
        simulate(jobs, Recorder(views), SimFleet(costs=SECOND))
        seen.append([view for view in views if view.request.id == "waits" and not view.emitted])
    assert seen[0] == seen[1]


@dataclass(frozen=True, slots=True)
class Recorder(Fcfs):
    views: list[Seen]

    def claim(self, view: View, round_s: float) -> Claim:
        self.views.append(Seen.of(view))
        return Fcfs.claim(self, view, round_s)


GOLDEN = {
    "gittins": 6651.745,
    "fcfs": 10450.185,
    "sjf": 7809.625,
    "srpt-length": 6529.183,
    "las": 10114.896,
    "mlfq": 10022.987,
    "gsa": 11404.62,
    "laps-sd": 7750.525,
    "oracle": 5908.743,
}


@pytest.mark.parametrize(("name", "mean_ms"), GOLDEN.items())
def test_golden(name: str, mean_ms: float) -> None:
    """Changes only when a decision does: then look at why, and only then write the new figure down."""
    fleet = SimFleet(slots=2)
    jobs = generate(Synthetic(requests=150, load=0.9), 7, fleet)
    assert summarise(simulate(jobs, policy(name, jobs), fleet))["mean_e2el_ms"] == pytest.approx(mean_ms, rel=1e-6)
