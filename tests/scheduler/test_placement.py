"""Whom a worker lists, what it takes from others, what it is to forget, and who plans when a request comes."""

from dataclasses import replace

import pytest

from scheduler_service.core.events import Held, StepDone, Submitted
from scheduler_service.core.placement import SPARES, called_for, claimable, idle_beside_work
from scheduler_service.core.types import RequestClass
from tests.scheduler.builders import COST, FakeWorker, core, request, worker_up


def test_the_list_has_a_few_spares_however_many_slots_there_are() -> None:
    worker = FakeWorker(core(), {}, slots=20)
    worker.submit(*map(str, range(100)))
    assert len(worker.core.plan("w").schedule) == 20 + SPARES


def test_a_plan_says_once_what_has_gone_from_its_worker() -> None:
    worker = FakeWorker(core("fcfs"), {"a": 1, "b": 9, "c": 9}, slots=1)
    worker.submit("a", "b", "c")
    worker.step()
    assert worker.core.plan("w").to_forget == ("a",)  # it has ended
    worker.core.observe(worker_up("idle"), 1.0)
    assert worker.core.plan("idle").schedule[0].id == "c"
    assert worker.core.plan("w").to_forget == ("c",)
    assert worker.core.plan("w").to_forget == ()


def test_what_a_worker_holds_of_ended_requests_is_to_be_forgotten() -> None:
    queue = core()
    queue.observe(Submitted(request("live")), 0.0)
    queue.observe(worker_up(held=(Held("live", 1), Held("ended", 1))), 0.0)
    assert queue.plan("w").to_forget == ("ended",)


def test_kv_of_an_earlier_stay_is_forgotten_though_the_request_comes_back_and_waits() -> None:
    """It would take memory that the core counts as free, and those that run there would wait for it for ever."""
    queue = core("fcfs")
    for id in ("first", "second"):
        queue.observe(Submitted(request(id, prompt=105)), 0.0)
    attached = worker_up(slots=2, blocks=14, held=(Held("first", 1, blocks=7), Held("second", 1, blocks=7)))
    queue.observe(attached, 0.0)
    assert queue.plan("w").drop == ("second",)  # the link breaks before the worker hears of it
    queue.observe(attached, 1.0)
    plan = queue.plan("w")
    assert [run.id for run in plan.schedule] == ["first"]
    assert plan.to_forget == ("second",)


def test_of_what_waits_at_another_a_worker_without_idle_slots_takes_one_at_a_time() -> None:
    """The other is about to run the rest itself."""
    queue = core("srpt-length")
    one = FakeWorker(queue, dict.fromkeys("abcd", 9), name="one", slots=2)
    one.submit("a", "b", "c", "d", predicted_tokens=10)
    one.step()
    other = FakeWorker(queue, {"e": 30, "f": 30}, name="other", slots=2)
    other.submit("e", "f", predicted_tokens=30)
    queue.fleet.entries["c"].home = queue.fleet.entries["d"].home = "one"
    assert [run.id for run in queue.plan("other").schedule] == ["c", "e", "f"]
    assert [run.id for run in queue.plan("other").schedule] == ["c", "d", "e", "f"]


@pytest.mark.parametrize("by", ["a report", "a plan"])
def test_a_request_that_loses_its_kv_may_be_claimed_though_its_place_stays(by: str) -> None:
    """Where the search begins is kept, but neither beyond a report of its worker nor beyond a plan for it."""
    queue = core("fcfs")
    one = FakeWorker(queue, dict.fromkeys("abc", 9), name="one", slots=2)
    one.submit("a", "b", "c")
    one.step()
    other = FakeWorker(queue, {"d": 9}, name="other")
    other.submit("d")
    queue.fleet.place(entry := queue.fleet.entries["c"], "one")
    queue.fleet.place(last := queue.fleet.entries["d"], "other")
    entry.blocks = 1
    assert claimable(queue.fleet, "other", [last]) is None
    entry.blocks = 0
    queue.observe(StepDone("one", (), 1000, 1.0, partial=True), 2.0) if by == "a report" else queue.fleet.workers[
        "one"
    ].plan(())
    assert claimable(queue.fleet, "other", [last]) is entry


def test_a_request_calls_for_a_plan_if_it_is_to_run_next_or_spares_are_missing() -> None:
    queue = core("las")
    worker = FakeWorker(queue, {}, slots=1)
    worker.submit("runs")
    assert called_for(queue.fleet, "runs") == worker.name
    queue.plan(worker.name)
    worker.submit("spare")
    assert called_for(queue.fleet, "spare") == worker.name
    queue.plan(worker.name)
    worker.submit("waits")
    assert called_for(queue.fleet, "waits") is None
    worker.submit("urgent", klass=RequestClass.INTERACTIVE)
    assert called_for(queue.fleet, "urgent") == worker.name


def test_a_request_calls_for_the_worker_that_can_hold_it_though_a_smaller_one_is_as_idle() -> None:
    queue = core("fcfs")
    for name, blocks in (("small", 100), ("large", 2000)):
        queue.observe(worker_up(name, slots=4, blocks=blocks), 0.0)
    queue.observe(Submitted(request("much", prompt=5000, max_tokens=100)), 0.0)
    assert called_for(queue.fleet, "much") == "large"
    assert not queue.plan("small").schedule
    assert idle_beside_work(queue.fleet) == "large"
    assert [run.id for run in queue.plan("large").schedule] == ["much"]
    assert idle_beside_work(queue.fleet) is None
    queue.observe(Submitted(request("little")), 0.0)
    assert idle_beside_work(queue.fleet) == called_for(queue.fleet, "little") == "small"


def test_a_small_worker_is_woken_for_nothing_that_only_a_busy_one_can_hold() -> None:
    queue = core("fcfs")
    large = FakeWorker(queue, {"runs": 9}, "large", blocks=2000)
    queue.observe(worker_up("small", slots=4, blocks=100), 0.0)
    large.submit("runs", "waits", prompt=5000, max_tokens=100)
    large.step()
    large.submit("last", prompt=5000, max_tokens=100)
    assert idle_beside_work(queue.fleet) is None


def test_with_foresight_an_empty_worker_takes_one_that_waits_for_memory_however_long() -> None:
    """Alone it may begin anywhere."""
    queue = core("fcfs")
    queue.fleet.foresight = True
    dear = replace(COST, prefill_token_s=1.0)
    busy = FakeWorker(queue, {"long": 100, "waits": 280}, "busy", slots=2, blocks=20, cost=dear)
    busy.submit("long", max_tokens=100, prompt=100)
    busy.run(2)
    busy.submit("waits", max_tokens=150, prompt=160)
    busy.run(2)
    assert queue.fleet.workers["busy"].left_out == ("waits",)
    FakeWorker(queue, busy.lengths, "empty", slots=2, blocks=20, cost=dear)
    assert [run.id for run in queue.plan("empty").schedule] == ["waits"]
