"""Generators: seeded, and with the statistics that they promise."""

import math
from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from scheduler_service.sim.costs import StepCosts
from scheduler_service.sim.generate import KINDS, MIX, Synthetic, generate, parse_synthetic, with_acceptance
from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job, WorkloadError

COSTS = StepCosts()


def jobs(seed: int = 1, slots: int = 1, **settings: float) -> list[Job]:
    return generate(Synthetic(**{"requests": 4000} | settings), seed, SimFleet(slots=slots))  # type: ignore[arg-type]


def test_a_seed_gives_one_workload() -> None:
    assert jobs(1, requests=50) == jobs(1, requests=50) != jobs(2, requests=50)


def test_lengths_have_the_mean_and_variation_asked_for() -> None:
    lengths = [job.output_tokens for job in jobs(output_mean=300, output_cv=1.1, requests=20_000)]
    assert fmean(lengths) == pytest.approx(300, rel=0.05)
    assert pstdev(lengths) / fmean(lengths) == pytest.approx(1.1, rel=0.1)


def test_predictions_err_by_sigma() -> None:
    made = jobs(sigma=0.5, output_mean=2000)
    errors = [math.log((job.predicted_output_tokens or 0) / job.output_tokens) for job in made]
    assert pstdev(errors) == pytest.approx(0.5, rel=0.05)
    assert abs(fmean(errors)) < 0.05


def test_useless_predictions_know_nothing_of_the_length() -> None:
    made = jobs(sigma=math.inf)
    lengths = [math.log(job.output_tokens) for job in made]
    guesses = [math.log(job.predicted_output_tokens or 0) for job in made]
    covariance = fmean(a * b for a, b in zip(lengths, guesses, strict=True)) - fmean(lengths) * fmean(guesses)
    assert abs(covariance / pstdev(lengths) / pstdev(guesses)) < 0.05


@pytest.mark.parametrize("slots", [1, 4])
def test_the_load_is_work_over_time(slots: int) -> None:
    made = jobs(slots=slots, load=0.8)
    step_s = COSTS.step_s(4, slots, 5 * slots, 0, 0)
    work_s = sum(job.rounds(4) * step_s / slots + job.prompt_tokens * 1e-4 for job in made)
    assert work_s / made[-1].arrival_s == pytest.approx(0.8, rel=0.05)


def test_the_load_of_a_fleet_without_drafts_counts_none() -> None:
    made = generate(Synthetic(requests=4000, load=0.8), 1, SimFleet(draft_len=0))
    work_s = sum(job.rounds(0) * COSTS.step_s(0, 1, 1, 0, 0) + job.prompt_tokens * 1e-4 for job in made)
    assert work_s / made[-1].arrival_s == pytest.approx(0.8, rel=0.05)


def test_an_infinite_load_arrives_at_once() -> None:
    assert {job.arrival_s for job in jobs(load=math.inf, requests=10)} == {0.0}


def test_bursts_vary_the_gaps() -> None:
    arrivals = [job.arrival_s for job in jobs(arrival_cv=3)]
    gaps = [late - early for early, late in pairwise(arrivals)]
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(3, rel=0.15)


def test_acceptance_differs_between_requests() -> None:
    means = [fmean(job.accepted) / 4 for job in jobs() if len(job.accepted) > 50]
    assert pstdev(means) > 0.1


def test_a_job_without_acceptance_gets_one_of_its_own_seed() -> None:
    bare = [Job("a", 0.0, 1, 100), Job("b", 0.0, 1, 100)]
    first, second = with_acceptance(bare, 4, 1), with_acceptance(bare[1:], 4, 1)
    assert first[1] == second[0]
    assert first[0].accepted != first[1].accepted


def test_acceptance_that_was_recorded_stays() -> None:
    recorded = [Job("a", 0.0, 1, 100, (1, 2))]
    assert with_acceptance(recorded, 4, 1) == recorded


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("speed=1", "'speed' is not a setting"), ("load=fast", "load: 'fast' is no float"), ("load=0", "load must be")]
    + [(f"sigma={sigma}", "sigma must be") for sigma in ("1000", "-inf", "nan")],
)
def test_a_wrong_setting_is_refused_by_name(text: str, complaint: str) -> None:
    with pytest.raises(WorkloadError, match=complaint):
        parse_synthetic(text)


def test_a_mix_takes_the_kinds_of_the_paper_in_turn() -> None:
    made = generate(Synthetic(3000, kind="mix"), 1, SimFleet())
    assert [job.category for job in made[:4]] == ["chat", "code", "reasoning", "chat"]
    for kind in MIX:
        lengths = [job.output_tokens for job in made if job.category == kind]
        assert fmean(lengths) == pytest.approx(KINDS[kind]["output_mean"], rel=0.1)


def test_a_kind_is_the_same_alone() -> None:
    mixed = parse_synthetic("kind=mix,sigma=0.3").parts()
    assert mixed == [parse_synthetic(f"kind={kind},sigma=0.3").parts()[0] for kind in MIX]


def test_a_kind_that_is_not_known_is_refused() -> None:
    with pytest.raises(WorkloadError, match="kind must be one of chat, code"):
        parse_synthetic("kind=poetry")
