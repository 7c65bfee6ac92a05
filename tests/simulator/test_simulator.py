"""The simulator against small cases worked out by hand."""

from dataclasses import replace
from random import Random

import pytest

from scheduler_service.core.beliefs import Expected, Length
from scheduler_service.core.entry import WORTH
from scheduler_service.sim.costs import StepCosts
from scheduler_service.sim.results import summarise
from scheduler_service.sim.simulator import Simulation
from scheduler_service.sim.worker import SimFleet
from tests.simulator.builders import SECOND, ends, job, policy, run


def test_a_round_emits_its_accepted_drafts_and_one_more() -> None:
    assert ends(run([job("a", tokens=10, accepted=(4, 0, 2))])) == {"a": 4}  # 5 + 1 + 3 + (5, cut to 1)


def test_a_shorter_draft_clips_what_was_accepted() -> None:
    assert ends(run([job("a", tokens=9, accepted=(4,))], draft_len=2)) == {"a": 3}


def test_without_drafts_a_round_emits_one_token() -> None:
    assert ends(run([job("a", tokens=9, accepted=(4,))], draft_len=0)) == {"a": 9}


def test_the_longest_pause_of_a_request_is_told() -> None:
    """The long one runs from 0 to 3, pauses for two rounds, and ends at 8."""
    jobs = [job("long", tokens=6, predicted_output_tokens=6), job("short", 2.5, tokens=2, predicted_output_tokens=2)]
    trace = run(jobs, "srpt-length")
    assert {outcome.job.id: outcome.longest_gap_s for outcome in trace.outcomes} == {"short": 1, "long": 3}
    results = summarise(trace)
    assert results["mean_pause_ms"] == pytest.approx(2000)
    assert results["p99_pause_ms"] == pytest.approx(2980)


def test_an_answer_is_in_time_if_it_begins_and_goes_on_so() -> None:
    """At 99 ms a token the second begins within a second, and the third does not."""
    costs = StepCosts(0, 99, 0, 0, 0)
    jobs = [job("a", tokens=9), job("b", tokens=9), job("c", tokens=1)]
    assert summarise(run(jobs, costs=costs))["good_share"] == pytest.approx(2 / 3)
    assert summarise(run([job("a", tokens=9)], costs=replace(costs, t_verify_ms=101)))["good_share"] == 0


def test_a_step_costs_what_the_formula_says() -> None:
    """Two requests of one round each: 4 * 1 + 30 * (1 + .1) + .5 * 10 + .1 * (7 + 3) ms."""
    costs = StepCosts(t_draft_ms=1, t_verify_ms=30, t_verify_slope=0.1, t_token_ms=0.5, t_prefill_ms_per_token=0.1)
    jobs = [job("a", tokens=1, prompt_tokens=7), job("b", tokens=1, prompt_tokens=3)]
    assert ends(run(jobs, slots=2, costs=costs)) == pytest.approx({"a": 0.043, "b": 0.043})


def test_a_resumed_request_costs_its_resume_once() -> None:
    costs = StepCosts(0, 1000, 0, 0, 0, t_resume_ms=100)
    jobs = [job("long", tokens=5, predicted_output_tokens=5), job("short", 1.5, tokens=1, predicted_output_tokens=1)]
    assert ends(run(jobs, "srpt-length", costs=costs)) == pytest.approx({"short": 3.0, "long": 6.1})


def test_fcfs_makes_the_second_wait_for_the_first() -> None:
    assert ends(run([job("a"), job("b", 3.0)])) == {"a": 10, "b": 20}


def test_slots_run_side_by_side() -> None:
    assert ends(run([job("a"), job("b"), job("c")], slots=2)) == {"a": 10, "b": 10, "c": 20}


def test_workers_run_side_by_side() -> None:
    assert ends(run([job("a"), job("b")], workers=2)) == {"a": 10, "b": 10}


def test_an_arrival_is_seen_at_the_next_end_of_a_round() -> None:
    jobs = [job("long", tokens=9, predicted_output_tokens=9), job("short", 2.5, tokens=1, predicted_output_tokens=1)]
    assert ends(run(jobs, "srpt-length")) == {"short": 4, "long": 10}


def test_with_plan_lag_a_round_is_seen_one_round_later() -> None:
    """Under las the second runs once the first has run; the plan that says so comes a round late."""
    jobs = [job("first", tokens=5), job("second", tokens=5)]
    begins = [
        {outcome.job.id: outcome.first_token_s for outcome in run(jobs, "las", plan_lag=lag).outcomes} for lag in (0, 1)
    ]
    assert begins == [{"first": 1, "second": 2}, {"first": 1, "second": 3}]


def test_with_plan_lag_an_arrival_is_seen_at_once_all_the_same() -> None:
    jobs = [job("long", tokens=9, predicted_output_tokens=9), job("short", 2.5, tokens=1, predicted_output_tokens=1)]
    assert ends(run(jobs, "srpt-length", plan_lag=1)) == {"short": 4, "long": 10}


def test_a_long_prompt_is_computed_in_chunks() -> None:
    assert ends(run([job("a", tokens=2, prompt_tokens=100)], prefill_chunk=40)) == {"a": 4}


def test_kv_that_was_dropped_is_computed_again() -> None:
    costs = StepCosts(0, 1000, 0, 0, t_prefill_ms_per_token=100)
    jobs = [
        job("long", tokens=20, prompt_tokens=10, predicted_output_tokens=20),
        job("short", 8.5, tokens=1, prompt_tokens=20, predicted_output_tokens=1),
    ]
    roomy = ends(run(jobs, "srpt-length", costs=costs))
    tight = ends(run(jobs, "srpt-length", costs=costs, kv_budget_tokens=40))
    assert tight["short"] == roomy["short"]
    assert tight["long"] == pytest.approx(roomy["long"] + 0.1 * (10 + 8))


def test_kv_that_was_offloaded_is_not_computed_again() -> None:
    costs = StepCosts(0, 1000, 0, 0, t_prefill_ms_per_token=100, t_offload_ms_per_token=10)
    jobs = [
        job("long", tokens=20, prompt_tokens=10, predicted_output_tokens=20),
        job("short", 5.5, tokens=1, prompt_tokens=20, predicted_output_tokens=1),
    ]
    roomy = ends(run(jobs, "srpt-length", costs=costs))
    tight = ends(run(jobs, "srpt-length", costs=costs, kv_budget_tokens=40, host_kv_tokens=40))
    assert tight["short"] == roomy["short"]
    assert tight["long"] == pytest.approx(roomy["long"] + 0.01 * (10 + 5))


@pytest.mark.parametrize("foresight", [False, True])
def test_with_foresight_nobody_begins_for_whom_memory_runs_out(foresight: bool) -> None:
    """Without it the second one begins beside the first, and pauses when the first needs its memory."""
    costs = StepCosts(0, 1000, 0, 0, t_prefill_ms_per_token=200)
    jobs = [job(id, tokens=20, prompt_tokens=1, predicted_output_tokens=20) for id in ("first", "second")]
    trace = run(jobs, slots=2, draft_len=0, costs=costs, kv_budget_tokens=30, foresight=foresight)
    pauses_s = {outcome.job.id: outcome.longest_gap_s for outcome in trace.outcomes}
    assert (pauses_s["second"] < 2) == foresight


def test_with_foresight_two_workers_do_not_send_a_request_to_each_other_for_ever() -> None:
    """Each has a slot for it, and memory for its prompt, but not for all of the output that is foreseen."""
    jobs = [
        job("a", 1, tokens=5, prompt_tokens=20),
        job("b", 1, tokens=1, prompt_tokens=20),
        job("c", 2, tokens=40, prompt_tokens=1),
    ]
    costs = StepCosts(0, 1000, 0, 0, t_prefill_ms_per_token=200)
    trace = run(jobs, slots=2, workers=2, draft_len=0, plan_lag=1, costs=costs, kv_budget_tokens=60, foresight=True)
    assert len(trace.outcomes) == len(jobs)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_prompts_are_not_computed_over_and_over_when_memory_is_short(slots: int) -> None:
    """las would go to another after every round; memory is for one of the three, and a rebuild takes two rounds."""
    costs = StepCosts(0, 1000, 0, 0, t_prefill_ms_per_token=100)
    jobs = [job(id, tokens=20, prompt_tokens=20) for id in "abc"]
    served_s, first_prefills_s = 3 * 20, 3 * 2
    assert max(ends(run(jobs, "las", costs=costs, slots=slots, kv_budget_tokens=60)).values()) <= (
        served_s * (1 + 1 / WORTH) + first_prefills_s
    )


@pytest.mark.parametrize("policy", ["fcfs", "sjf"])
def test_who_is_not_preempted_takes_no_turns_when_memory_is_short(policy: str) -> None:
    """With plans a round late two could each be the one that runs, and each lose its KV to the other for ever."""
    rng = Random(3574)
    jobs = [
        job(
            str(i),
            rng.random() * i,
            rng.choice([10, 60, 200]),
            (0, 4, 8),
            prompt_tokens=rng.choice([5, 40, 80]),
            draft_len=8,
        )
        for i in range(30)
    ]
    costs = StepCosts(2, 1, 0.1, 1, t_prefill_ms_per_token=5, t_resume_ms=30)
    fleet = {"slots": 3, "draft_len": 8, "kv_budget_tokens": 300, "plan_lag": 1, "prefill_chunk": 16}
    assert len(ends(run(jobs, policy, costs=costs, **fleet))) == len(jobs)


def test_what_no_worker_could_ever_hold_fails_at_once() -> None:
    trace = run([job("a", tokens=100), job("b", tokens=5)], kv_budget_tokens=50)
    assert [failed.id for failed in trace.failed] == ["a"]
    assert ends(trace) == {"b": 5}


def test_the_oracle_runs_the_truly_shortest() -> None:
    jobs = [job("a", tokens=9, predicted_output_tokens=1), job("b", tokens=3, predicted_output_tokens=99)]
    assert ends(run(jobs, "oracle")) == {"b": 3, "a": 12}


def test_results_have_the_names_and_units_of_vllm_bench_serve() -> None:
    results = summarise(run([job("a", tokens=10, accepted=(4,)), job("b", 1.0, tokens=10, accepted=(1,))]))
    assert results["completed"] == 2
    assert results["duration"] == pytest.approx(7.0)
    assert results["mean_ttft_ms"] == pytest.approx((1000 + 2000) / 2)
    assert results["mean_e2el_ms"] == pytest.approx((2000 + 6000) / 2)
    assert results["mean_tpot_ms"] == pytest.approx((1000 / 9 + 4000 / 9) / 2)
    assert results["mean_itl_ms"] == pytest.approx(1000)
    assert results["request_throughput"] == pytest.approx(2 / 7)
    assert results["output_throughput"] == pytest.approx(20 / 7)
    assert results["spec_decode_num_drafts"] == 7
    assert results["spec_decode_acceptance_length"] == pytest.approx(1 + 13 / 7)
    assert results["spec_decode_acceptance_rate"] == pytest.approx(100 * 13 / 28)


def test_no_round_is_free() -> None:
    assert run([job("a", tokens=3)], costs=SECOND).outcomes[0].latency_s == 3


def test_a_worker_without_room_says_so_and_gets_a_better_plan() -> None:
    """With plans a round late the core may count on memory that is gone; found by hypothesis."""
    sizes = [
        (1.5, 1, 34),
        (0, 43, 34),
        (1, 18, 18),
        (0.5, 47, 18),
        (0, 1, 18),
        (0, 43, 34),
        (0.5, 7, 34),
        (0, 1, 1),
        (1.5, 40, 18),
    ]
    jobs = [job(f"j{i}", at, tokens, prompt_tokens=prompt) for i, (at, prompt, tokens) in enumerate(sizes)]
    assert len(ends(run(jobs, "gsa", plan_lag=1, draft_len=1, kv_budget_tokens=200))) == len(jobs)


def test_a_recorded_round_costs_what_its_drafter_proposed() -> None:
    """Drafts of 2 and 0 where 4 are allowed: 2 * 1 + 10, then 10 ms."""
    costs = StepCosts(t_draft_ms=1, t_verify_ms=10, t_verify_slope=0, t_prefill_ms_per_token=0)
    assert ends(run([job("a", tokens=4, accepted=(2, 0), drafted=(2, 0))], costs=costs)) == pytest.approx({"a": 0.022})


def test_a_recorded_round_that_computed_the_prompt_and_drafted_nothing_is_not_run_twice() -> None:
    costs = StepCosts(t_draft_ms=0.0, t_verify_ms=10.0, t_verify_slope=0.0, t_token_ms=0.0, t_prefill_ms_per_token=0.0)
    assert ends(run([job("a", tokens=4, accepted=(0, 2), drafted=(0, 2))], costs=costs)) == pytest.approx({"a": 0.02})


def test_a_recorded_prediction_goes_before_the_order_of_arrival() -> None:
    expected = {"long": Expected(Length(5.0, 0.1)), "short": Expected(Length(0.5, 0.1))}
    jobs = [job(id, tokens=tokens, expected=expected[id]) for id, tokens in (("long", 9), ("short", 2))]
    assert ends(run(jobs, "sjf")) == {"short": 2, "long": 11}


def test_queues_are_not_counted_at_each_arrival_of_jobs_that_are_offered() -> None:
    """As in a cell. In a burst that would be quadratic."""
    simulation = Simulation([], policy("las", []), SimFleet(costs=SECOND), most_tokens=16)
    for id in "abc":
        simulation.offer(job(id))
    trace = simulation.run()
    assert (len(trace.outcomes), trace.levels) == (3, [])
