"""The simulator where drafts are made elsewhere: nothing is lost, and hiding brings what it must."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_service.sim import apart as tables
from scheduler_service.sim import drafter, ready_first
from scheduler_service.sim.costs import StepCosts
from scheduler_service.sim.drafter import Apart, SimDrafter, Truth
from scheduler_service.sim.results import summarise
from scheduler_service.sim.simulator import Trace, simulate
from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job
from tests.simulator.builders import NAMES, job, policy
from tests.simulator.test_properties import workloads
from worker_service.engine.drafting.worth import fan_of
from worker_service.engine.ready_first import ReadyFirst

COSTS = StepCosts(t_draft_ms=200, t_verify_ms=1000, t_verify_slope=0, t_prefill_ms_per_token=0)
APARTS = st.builds(
    Apart,
    rtt_ms=st.sampled_from([0, 100, 3000]),
    supply_ms=st.sampled_from([1, 150, 2000]),
    chains=st.integers(0, 4),
    fan=st.integers(0, 3),
    lookup=st.sampled_from([0.0, 0.5]),
    wait=st.booleans(),
    ready_first=st.booleans(),
)
JOBS = [job(f"j{number}", 0.0, 200, (4, 2, 0, 4, 1), draft_len=4) for number in range(4)]
INSTANT = Apart(rtt_ms=0, supply_ms=0.001, chain_ms=0)
LOCAL = Apart(chains=0)


def run(apart: Apart | None, jobs: int = 1, **more: object) -> Trace:
    fleet = SimFleet(costs=COSTS, apart=apart, **({"draft_len": 4} | more))  # type: ignore[arg-type]
    return simulate(JOBS[:jobs], policy("fcfs", JOBS), fleet)


def seconds(trace: Trace) -> float:
    return max(outcome.end_s for outcome in trace.outcomes)


@settings(max_examples=60, deadline=None)
@given(workloads(), st.sampled_from(NAMES), APARTS, st.integers(1, 3), st.integers(0, 1), st.sampled_from([None, 4]))
def test_every_job_ends_once_with_all_its_tokens(
    jobs: list, name: str, apart: Apart, slots: int, plan_lag: int, draft_len: int | None
) -> None:
    fleet = SimFleet(slots=slots, workers=2, costs=COSTS, apart=apart, plan_lag=plan_lag, draft_len=draft_len)
    outcomes = simulate(jobs, policy(name, jobs), fleet).outcomes
    assert sorted((outcome.job.id, outcome.record.emitted) for outcome in outcomes) == sorted(
        (one.id, one.output_tokens) for one in jobs
    )


@settings(max_examples=40, deadline=None)
@given(APARTS)
def test_without_others_that_wait_ready_first_changes_nothing(apart: Apart) -> None:
    ends = [seconds(run(replace(apart, ready_first=on), jobs=3, slots=3)) for on in (False, True)]
    assert ends[0] == ends[1]


def test_drafts_that_are_there_at_once_cost_nothing_and_as_many_are_accepted() -> None:
    """A pass a round, where a worker that drafts itself adds 4 * 0.2 s."""
    hidden, local = run(INSTANT), run(LOCAL)
    passes = seconds(hidden)
    assert passes == pytest.approx(sum(outcome.record.acceptance.rounds + 1 for outcome in hidden.outcomes), abs=0.1)
    assert seconds(local) > 1.65 * passes


def test_a_drafter_that_is_far_away_brings_nothing_and_takes_nothing() -> None:
    far = Apart(rtt_ms=9_000, supply_ms=100, fan=0)
    assert seconds(run(far)) == pytest.approx(seconds(run(None, draft_len=0)), rel=0.1)
    assert seconds(run(far)) <= seconds(run(None, draft_len=0)) + 1


def test_guesses_at_the_outcome_bring_what_a_round_trip_takes() -> None:
    """Two thirds of a pass away: without guesses no draft is there in time, with guesses those of the right one are."""
    ends = [seconds(run(Apart(rtt_ms=700, supply_ms=50, fan=fan, second=0.9))) for fan in (0, 1, 3)]
    assert ends[2] < ends[1] < ends[0]


def test_a_worker_and_the_simulator_ask_for_as_many_guesses_at_the_outcome() -> None:
    for costs in itertools.product([0.5, 2.0], [0.0, 0.01, 0.1, 1.0], [1, 4, 32], [0, 4, 16]):
        assert drafter.fan_of(*costs) == fan_of(*costs)


def test_where_further_chains_seem_to_cost_nothing_many_requests_get_fewer_guesses() -> None:
    assert fan_of(0.001, 0.0, 1, 4) == 4
    assert fan_of(0.001, 0.0, 64, 8) == 2


def test_ready_first_brings_all_drafts_where_nobody_guesses() -> None:
    far = Apart(rtt_ms=300, supply_ms=100, fan=0, wait=False)
    off, on = run(far, jobs=4, slots=2), run(replace(far, ready_first=True), jobs=4, slots=2)
    assert seconds(on) < 0.8 * seconds(off)
    results = [summarise(trace)["spec_decode_num_drafts"] / trace.rounds for trace in (off, on)]
    assert results[1] > 0.9 > results[0]
    assert not any(outcome.record.preemptions for outcome in on.outcomes)


def test_only_so_many_are_drafted_for_as_there_are_chains() -> None:
    shares = []
    for chains in (1, 2):
        trace = run(replace(INSTANT, chains=chains), jobs=2, slots=2)
        shares.append(trace.drafts / trace.rounds)
    assert shares[0] < 0.6 < 0.9 < shares[1]


def test_what_is_looked_up_serves_where_drafts_are_late() -> None:
    far = Apart(rtt_ms=9_000, supply_ms=100, fan=0, lookup=0.6)
    assert seconds(run(far)) < 0.7 * seconds(run(replace(far, lookup=0.0)))


def test_a_pass_over_stages_costs_its_links_once_whatever_it_verifies() -> None:
    """k * t0 + (N - 1) * t1 for k tokens, where each token alone would take t0 + (N - 1) * t1."""
    costs = StepCosts(0, 10, 0, 5, 0, t_links_ms=3 * 20)
    assert costs.step_s(0, 1, 8, 0, 0) == pytest.approx(8 * 0.005 + 0.010 + 3 * 0.020)
    assert costs.profile().verify_s == pytest.approx(0.015 + 3 * 0.020)


@pytest.mark.parametrize("link_ms", [5, 20])
def test_stages_that_verify_drafts_which_are_all_right_emit_that_much_faster(link_ms: float) -> None:
    """A round takes as long whatever it verifies, and brings four drafts and a token."""
    jobs = [Job("a", 0.0, 1, 300, (4,), 4)]
    plain = SimFleet(draft_len=0, costs=StepCosts(0.0, 10, 0.0, 0.0, 0.0, t_links_ms=3 * link_ms))
    faster = tables.tokens_per_s(jobs, replace(plain, draft_len=4)) / tables.tokens_per_s(jobs, plain)
    assert faster == pytest.approx(5, rel=0.1)


def test_a_table_has_every_mode_and_measured_points_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    point = {"what": "two processes", "profile": "8B + 1B", "batch": 1, "rtt_ms": 5, "mode": "guesses", "x": 1.5}
    (tmp_path / "points.json").write_text(json.dumps([point]))
    words = ["--profile", "8B + 1B", "--batches", "1", "--rtts-ms", "1,5", "--tokens", "60"]
    monkeypatch.setattr("sys.argv", ["apart", *words, "--measured", str(tmp_path / "points.json")])
    tables.main()
    head, _, row, *_, measured = capsys.readouterr().out.strip().splitlines()
    cells = dict(zip(head.split(" | ")[1:], row.split(" | ")[1:], strict=True))
    modes = [f"{mode} {rtt}" for mode in tables.MODES for rtt in (1, 5)]
    assert [cell.rstrip(" |") for cell in cells] == ["plain tok/s", "local", *modes]
    assert measured == f"| two processes | guesses, 5 | 1.50 | {cells['guesses 5']} |"


@pytest.mark.parametrize(
    "points", ['{"a": 1}', '[{"profile": "none"}]', '[{"profile": "8B + 1B", "mode": "local"}]', "]"]
)
def test_bad_points_end_with_a_sentence(points: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "points.json").write_text(points)
    monkeypatch.setattr("sys.argv", ["apart", "--measured", str(tmp_path / "points.json")])
    with pytest.raises(SystemExit) as ended:
        tables.main()
    assert ended.value.code == 2


def test_lengths_grow_by_themselves_with_the_time_that_a_link_takes() -> None:
    lengths = []
    for link in (0.0, 5.0, 50.0):
        fleet = SimFleet(draft_len=None, most_drafts=16, costs=StepCosts(1, 10, 0, 2, 0, t_links_ms=3 * link))
        trace = simulate(JOBS[:1], policy("fcfs", JOBS), fleet)
        lengths.append(sum(outcome.record.acceptance.drafted for outcome in trace.outcomes) / trace.rounds)
    assert lengths == sorted(lengths)
    assert lengths[2] > 1.5 * lengths[0]


# ---- the drafter ----


def test_a_chain_goes_on_through_a_pass_only_if_its_drafter_guesses() -> None:
    truth = Truth(job("a", 0.0, 100, (4,)), 0.0)
    for fan, there in ((0, 4), (1, 9)):
        drafter = SimDrafter(Apart(rtt_ms=0, supply_ms=10, chain_ms=0, fan=fan), pass_s=1.0, read_s=0.0)
        drafter.tell("a", truth, 0, 10, 4, 0.0)
        drafter.offer("a", 0, 1.0)
        assert len(drafter._texts["a"].main) == there


def test_a_draft_is_there_half_a_round_trip_after_it_was_made_and_is_made_as_long_after_it_was_asked_for() -> None:
    truth = Truth(job("a", 0.0, 100, (4,)), 0.0)
    drafter = SimDrafter(Apart(rtt_ms=100, supply_ms=10, chain_ms=0, fan=0), pass_s=1.0, read_s=0.0)
    drafter.tell("a", truth, 0, 10, 4, 0.0)
    assert [drafter.offer("a", 0, at)[0] for at in (0.1, 0.1101, 0.1201, 0.2)] == [0, 1, 2, 4]


# ---- the rule is the worker's ----

IDS = [f"r{number}" for number in range(5)]
LATE = st.dictionaries(st.sampled_from(IDS), st.booleans())
STEP = st.tuples(st.permutations(IDS), st.sets(st.sampled_from(IDS)), LATE)


@given(st.lists(STEP, max_size=10), st.integers(1, 4), st.data())
def test_the_simulated_worker_lets_the_same_requests_go_first_as_the_real_one(
    steps: list[tuple[list[str], set[str], dict[str, bool]]], slots: int, data: st.DataObject
) -> None:
    mine, theirs = ready_first.ReadyFirst(), ReadyFirst()
    for listed, yields, late in steps:
        order = mine.order(listed, slots, yields, late)
        assert theirs.order(listed, slots, yields, late) == order
        ran = order[: data.draw(st.integers(0, slots))]
        assert mine.ran(ran, listed) == theirs.ran(ran, listed)
