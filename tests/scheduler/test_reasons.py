"""Why a request does not run now, and who passed it."""

import pytest

from scheduler_service.core.costs import CostProfile
from scheduler_service.core.events import Submitted
from scheduler_service.core.reasons import NAMED, Reason, why
from scheduler_service.core.types import RequestClass
from tests.scheduler.builders import FakeWorker, core, request


def test_a_request_that_runs_has_no_reason() -> None:
    worker = FakeWorker(core("fcfs"), {"a": 9})
    worker.submit("a")
    worker.step()
    assert why(worker.core.fleet, "a") is None


def test_without_a_worker_nothing_runs() -> None:
    waiting = core("fcfs")
    waiting.observe(Submitted(request("a")), 0.0)
    assert why(waiting.fleet, "a") == (Reason.NO_WORKER, [])


def test_first_come_first_served_names_the_arrival() -> None:
    worker = FakeWorker(core("laps-sd"), {"a": 9, "b": 9})
    worker.submit("a")
    worker.step()
    worker.submit("b")
    worker.step()
    assert why(worker.core.fleet, "b") == (Reason.ARRIVAL, [])


def test_a_request_that_was_paused_names_the_one_that_passed_it() -> None:
    worker = FakeWorker(core("srpt-length"), {"long": 50, "short": 10})
    worker.submit("long", predicted_tokens=50)
    worker.step()
    worker.submit("short", predicted_tokens=10)
    worker.step()
    assert why(worker.core.fleet, "long") == (Reason.CLAIM, ["short"])


def test_a_policy_that_never_pauses_says_that_others_have_begun() -> None:
    worker = FakeWorker(core("sjf"), {"long": 50, "short": 10})
    worker.submit("long", predicted_tokens=50)
    worker.step()
    worker.submit("short", predicted_tokens=10)
    worker.step()
    assert why(worker.core.fleet, "short") == (Reason.BEGUN, [])


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ({"klass": RequestClass.BATCH}, {"klass": RequestClass.INTERACTIVE}, Reason.CLASS),
        ({"tenant": "greedy"}, {"tenant": "modest"}, Reason.TENANT),
    ],
)
def test_a_class_or_a_tenant_goes_before_the_policy(
    first: dict[str, object], second: dict[str, object], reason: Reason
) -> None:
    worker = FakeWorker(core("srpt-length"), {"a": 50, "b": 50}, cost=CostProfile(verify_s=0.2))
    worker.submit("a", predicted_tokens=50, **first)
    worker.step()
    worker.submit("b", predicted_tokens=50, **second)
    for _ in range(9):  # accounts of tenants are compared in half seconds
        worker.step()
        if worker.ran[-1] == ("b",):
            break
    assert why(worker.core.fleet, "a") == (reason, ["b"])


def test_a_request_before_all_that_run_waits_for_its_turn_alone() -> None:
    worker = FakeWorker(core("srpt-length"), {"long": 50, "short": 10})
    worker.submit("long", predicted_tokens=50)
    worker.step()
    worker.submit("short", predicted_tokens=10)
    assert why(worker.core.fleet, "short") == (Reason.TURN, [])


def test_few_of_many_that_passed_are_named() -> None:
    ids = [f"short{number}" for number in range(2 * NAMED)]
    worker = FakeWorker(core("srpt-length"), {"long": 50, **dict.fromkeys(ids, 10)}, slots=2 * NAMED)
    worker.submit("long", predicted_tokens=50)
    worker.step()
    worker.submit(*ids, predicted_tokens=10)
    worker.step()
    reason, passed_by = why(worker.core.fleet, "long") or (None, [])
    assert reason is Reason.CLAIM
    assert passed_by == ids[:NAMED]
