"""The predictor in the simulator: asked at every arrival, told at every end."""

from dataclasses import replace
from functools import cache
from random import Random

import pytest

from scheduler_service.core.policies import make_policy
from scheduler_service.predictor import PredictorKind, make_predictor
from scheduler_service.sim.generate import Synthetic, generate
from scheduler_service.sim.results import summarise
from scheduler_service.sim.simulator import simulate
from scheduler_service.sim.worker import SimFleet
from scheduler_service.sim.workload import Job

FLEET = SimFleet()


def jobs(*, kinds: bool) -> list[Job]:
    """Nobody predicts; with `kinds` the category tells whether an answer is short or long."""
    plain = generate(Synthetic(requests=240, predicted=False), 3, FLEET)
    if not kinds:
        return plain
    rng = Random(5)
    lengths = {"yes or no": (20, 40), "essay": (300, 500)}
    return [
        replace(job, category=kind, output_tokens=rng.randint(*lengths[kind]))
        for job, kind in ((job, rng.choice(list(lengths))) for job in plain)
    ]


@cache
def mean_ms(kind: str, policy: str = "gittins", *, kinds: bool = True, run: int = 1) -> float:
    """Every run of equal inputs is made once."""
    trace = simulate(jobs(kinds=kinds), make_policy(policy), FLEET, predictor=make_predictor(PredictorKind(kind)))
    return summarise(trace)["mean_e2el_ms"]


@pytest.mark.parametrize("policy", ["sjf", "gittins"])
def test_a_category_that_tells_lengths_makes_latency_lower(policy: str) -> None:
    assert mean_ms("online", policy) < 0.95 * mean_ms("none", policy)


def test_where_nothing_tells_lengths_every_decision_is_as_without_it() -> None:
    assert mean_ms("online", kinds=False) == mean_ms("none", kinds=False)


def test_equal_inputs_give_equal_simulations() -> None:
    assert mean_ms("online", run=1) == mean_ms("online", run=2)
