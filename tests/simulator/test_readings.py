"""Readings of a probe in workload files: read, written, and told to the core in the round that they fall into."""

import math
from pathlib import Path
from random import Random

import pytest

from scheduler_service.core.policies import make_policy
from scheduler_service.core.probed import Reading
from scheduler_service.sim.simulator import Simulation
from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job, WorkloadError, read_workload, write_workload


def test_a_file_keeps_them(tmp_path: Path) -> None:
    job = Job("0000001", 0.0, 10, 50, readings=(Reading(1, math.log(40)), Reading(33, math.log(20))))
    write_workload(tmp_path / "jobs.jsonl", [job])
    assert read_workload(tmp_path / "jobs.jsonl") == [job]


@pytest.mark.parametrize(
    "readings", ["[1]", '"ab"', "[[0, 5]]", "[[2, 5], [1, 5]]", "[[1, 0]]", "[[1.5, 3]]", "[[1, 2, 3]]"]
)
def test_one_that_cannot_be_is_refused_by_line(readings: str, tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text(f'{{"arrival_s": 0, "prompt_tokens": 9, "output_tokens": 50, "readings": {readings}}}\n')
    with pytest.raises(WorkloadError, match=r"jobs\.jsonl:1: readings"):
        read_workload(path)


def test_a_round_tells_its_last_one_and_the_end_tells_none() -> None:
    job = Job("a", 0.0, 10, 50, readings=tuple(Reading(after, 1.0) for after in (1, 4, 6, 49)))
    assert job.reading(0, 1) == Reading(1, 1.0)
    assert job.reading(1, 5) == Reading(6, 1.0)
    assert job.reading(6, 5) is None
    assert job.reading(48, 2) is None


def test_good_readings_lower_the_mean_latency() -> None:
    """Nothing else tells these lengths, and two slots are nearly full."""
    rng, jobs, at_s = Random(1), [], 0.0
    for number in range(400):
        tokens = max(2, round(math.exp(rng.gauss(4, 1.2))))
        told = Reading(1, math.log(tokens - 1) + rng.gauss(0, 0.2))
        at_s += rng.expovariate(1 / 2.3)
        jobs.append(Job(f"{number:04d}", at_s, 10, tokens, readings=(told,)))

    def mean_s(told: bool) -> float:
        some = jobs if told else [Job(job.id, job.arrival_s, 10, job.output_tokens) for job in jobs]
        trace = Simulation(some, make_policy("gittins"), SimFleet(slots=2)).run()
        return math.fsum(outcome.latency_s for outcome in trace.outcomes) / len(trace.outcomes)

    with_them, without = mean_s(told=True), mean_s(told=False)
    assert with_them < 0.95 * without
