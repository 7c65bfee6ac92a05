"""`max_pause_s`: a stream that has begun is not without tokens for longer."""

from random import Random

import pytest

from scheduler_service.core.events import Cancelled
from scheduler_service.core.policies import make_policy
from scheduler_service.sim.simulator import Trace
from scheduler_service.sim.workload import Job
from tests.scheduler.builders import FakeWorker, core, records
from tests.simulator.builders import job, run

FLOOD = [job("long", tokens=30, predicted_output_tokens=30)]
FLOOD += [job(str(i), 2.0 + i, tokens=1, predicted_output_tokens=1) for i in range(60)]


def longest_s(trace: Trace) -> float:
    return max(outcome.longest_gap_s for outcome in trace.outcomes)


def test_without_a_bound_a_stream_stands_still_while_shorter_requests_come() -> None:
    assert longest_s(run(FLOOD, "gittins")) >= 60


def test_with_a_bound_it_gets_a_round_in_time() -> None:
    trace = run(FLOOD, "gittins:max_pause_s=10")
    assert longest_s(trace) <= 10
    assert len(trace.outcomes) == len(FLOOD)


def loads(seed: int) -> list[Job]:
    rng = Random(seed)
    lengths = [rng.choice([2, 5, 40, 200]) for _ in range(40)]
    return [
        job(str(i), rng.random() * 60, tokens, (rng.randrange(4),), predicted_output_tokens=rng.choice(lengths))
        for i, tokens in enumerate(lengths)
    ]


@pytest.mark.parametrize("policy", ["gittins", "gittins:opening=first-token", "laps-sd", "laps-sd:reading=adapted"])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("plan_lag", [0, 1])
def test_no_stream_pauses_for_longer_whatever_comes(policy: str, slots: int, plan_lag: int) -> None:
    for seed in range(3):
        bounded = run(loads(seed), f"{policy}:max_pause_s=12", slots=slots, plan_lag=plan_lag)
        assert longest_s(bounded) <= 12
        assert len(bounded.outcomes) == 40


def test_streams_of_an_earlier_scheduler_are_due_at_once() -> None:
    old = FakeWorker(core("gittins", "max_pause_s=60"), {"begun": 50})
    old.submit("begun", predicted_tokens=50)
    old.run(3)
    successor = core("gittins", "max_pause_s=60")
    worker = FakeWorker(successor, {"begun": 50, "short": 9})
    successor.restore(records(old.core))
    worker.submit("short", predicted_tokens=9)
    assert worker.run(3) == ["short", "begun", "short"]


def test_streams_that_have_ended_are_forgotten_long_before_they_would_be_due() -> None:
    worker = FakeWorker(core("gittins", "max_pause_s=100000"), {str(i): 2 for i in range(500)})
    for i in range(500):
        worker.submit(str(i))
        worker.run(2)
    assert len(worker.core.fleet.pauses._due) <= 100


def test_what_has_ended_is_not_due() -> None:
    worker = FakeWorker(core("gittins", "max_pause_s=6"), {"gone": 50, "new": 50})
    worker.submit("gone")
    worker.run(2)
    worker.core.observe(Cancelled("gone"), worker.now)
    worker.submit("new")
    assert set(worker.run(20)) == {"new"}


@pytest.mark.parametrize("name", ["gittins", "laps-sd"])
@pytest.mark.parametrize("bound", ["-1", "0.01", "nan"])
def test_a_wrong_bound_is_refused(name: str, bound: str) -> None:
    with pytest.raises(ValueError, match="max_pause_s must be 0 or from"):
        make_policy(name, [f"max_pause_s={bound}"])
