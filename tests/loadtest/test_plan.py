"""What is sent, and when."""

import math
from itertools import pairwise
from statistics import fmean, stdev

import pytest

from laps_sd.loadtest.plan import Words, arrivals, clipped, plan, repeated, rescaled, synthetic
from scheduler_service.sim.workload import Job


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (100.0, 0.1)])
def test_burstiness_is_the_shape_of_gamma_distributed_gaps(burstiness: float, variation: float) -> None:
    drawn = gaps(arrivals(20_000, 4.0, burstiness=burstiness, seed=1))
    assert fmean(drawn) == pytest.approx(0.25, rel=0.05)
    assert stdev(drawn) / fmean(drawn) == pytest.approx(variation, rel=0.05)


def test_a_ramp_ends_at_its_other_rate() -> None:
    drawn = gaps(arrivals(20_000, 1.0, ramp_to=10.0, seed=1))
    assert 1 / fmean(drawn[:1000]) == pytest.approx(1.2, rel=0.1)
    assert 1 / fmean(drawn[-1000:]) == pytest.approx(9.8, rel=0.1)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrivals(3, math.inf) == [0, 0, 0]


def test_an_infinite_burstiness_makes_equal_gaps() -> None:
    assert arrivals(3, 4.0, burstiness=math.inf) == [0, 0.25, 0.5]


def test_equal_seeds_draw_equal_arrivals() -> None:
    assert arrivals(9, 1.0, seed=1) == arrivals(9, 1.0, seed=1) != arrivals(9, 1.0, seed=2)


def test_a_trace_is_rescaled_in_time_and_length() -> None:
    jobs = [Job("a", 10.0, 100, 50, predicted_output_tokens=80), Job("b", 14.0, 7, 0, max_tokens=30)]
    fast = rescaled(jobs, speed=2, length_scale=0.1)
    assert [(j.arrival_s, j.prompt_tokens, j.output_tokens) for j in fast] == [(0, 10, 5), (2, 1, 0)]
    assert [(j.predicted_output_tokens, j.max_tokens) for j in fast] == [(8, None), (None, 3)]


def test_a_coarse_clock_is_spread_and_the_order_kept() -> None:
    jobs = rescaled([Job(str(i), 0.0, 1, 1) for i in range(50)], spread_s=3.0)
    times = [job.arrival_s for job in jobs]
    assert times == sorted(times)
    assert 0 <= times[0] < 0.5
    assert 2.5 < times[-1] < 3


@pytest.mark.parametrize(
    ("given", "fitting"),
    [
        ((60, 40), (60, 40)),
        ((90, 40), (60, 40)),
        ((90, 70), (50, 50)),
        ((10, 99), (10, 90)),
        ((500, 5), (95, 5)),
    ],
)
def test_what_exceeds_the_context_is_clipped_and_counted(given: tuple[int, int], fitting: tuple[int, int]) -> None:
    (job,), cut = clipped([Job("a", 0.0, *given)], context_tokens=100, max_tokens=30)
    assert (job.prompt_tokens, job.output_tokens) == fitting
    assert cut == (given != fitting)


@pytest.mark.parametrize(
    ("prompt", "own", "fitting"), [(500, None, (70, 30)), (90, 40, (60, 40)), (60, 40, (60, 40)), (10, 200, (10, 90))]
)
def test_without_an_output_length_the_bound_is_what_must_fit(
    prompt: int, own: int | None, fitting: tuple[int, int]
) -> None:
    (job,), cut = clipped([Job("a", 0.0, prompt, 0, max_tokens=own)], context_tokens=100, max_tokens=30)
    assert (job.prompt_tokens, job.max_tokens) == fitting
    assert job.output_tokens == 0
    assert cut == ((prompt, own) != fitting)


def test_an_output_as_long_as_the_context_leaves_a_text_half_of_it() -> None:
    (job,), cut = clipped([Job("a", 0.0, 5, 0, max_tokens=1000, prompt="some text")], 100, max_tokens=30)
    assert (job.prompt_tokens, job.max_tokens, cut) == (5, 50, 1)


def test_a_text_is_not_clipped_for_what_its_tokens_may_be() -> None:
    job = Job("a", 0.0, 5000, 40, prompt="some text")
    assert clipped([job], context_tokens=100, max_tokens=30) == ([job], 0)


def test_fixed_lengths_ignore_the_end_of_the_text() -> None:
    fixed, free = plan([Job("a", 0, 5, 9), Job("b", 0, 5, 0)], [0, 0], max_tokens=30, ignore_eos=False, warmup=1)
    assert (fixed.max_tokens, fixed.ignore_eos, fixed.measured) == (9, True, False)
    assert (free.max_tokens, free.ignore_eos, free.measured) == (30, False, True)


def test_a_list_that_is_too_short_starts_over() -> None:
    jobs = synthetic(3, 5, 5)
    assert [job.id for job in repeated(jobs, 5)] == [jobs[i].id for i in (0, 1, 2, 0, 1)]


def test_a_synthetic_prompt_has_as_many_words_as_make_its_tokens() -> None:
    assert len(Words(per_word=2.0, extra=10).text(30, index=4).split()) == 10
    assert Words().text(30, 4) == Words().text(30, 4) != Words().text(30, 5)
