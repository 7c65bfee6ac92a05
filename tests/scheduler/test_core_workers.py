"""The core places requests on workers that come, go and stand idle. Time is a number."""

from dataclasses import replace

from scheduler_service.core.core import Core
from scheduler_service.core.events import Cancelled, Held, Round, StepDone, Submitted, WorkerDown
from scheduler_service.core.lifecycle import State
from tests.scheduler.builders import COST, FakeWorker, core, records, request, worker_up


def test_a_lost_workers_requests_run_elsewhere_with_the_tokens_they_have() -> None:
    queue = core()
    first = FakeWorker(queue, {"a": 9}, name="first")
    first.submit("a")
    first.run(3)
    queue.observe(WorkerDown("first"), first.now)
    second = FakeWorker(queue, {"a": 9}, name="second")
    (run,) = queue.plan("second").schedule
    assert (run.id, run.placement) == ("a", 2)
    second.step()
    assert queue.fleet.entries["a"].emitted == 4


def test_a_worker_that_comes_and_goes_writes_nothing_new() -> None:
    worker = FakeWorker(core(), dict.fromkeys("ab", 9), slots=2)
    worker.submit("a", "b")
    worker.step()
    assert len(worker.core.observe(WorkerDown("w"), 1.0)) == 2
    for _ in range(3):
        worker.core.observe(worker_up(held=(Held("a", 1), Held("b", 1))), 2.0)
        assert worker.core.observe(WorkerDown("w"), 2.0) == ()


def test_kv_of_a_placement_that_was_never_written_down_is_kept() -> None:
    """The leader that placed it died first."""
    queue = core("fcfs")
    queue.observe(Submitted(request("a")), 0.0)
    left = records(queue)
    successor = core("fcfs")
    successor.restore(left)
    successor.observe(worker_up(held=(Held("a", left[0].placement + 1),)), 1.0)
    assert successor.fleet.entries["a"].home == "w"
    assert successor.plan("w").schedule[0].placement == left[0].placement + 1


def test_kv_that_a_returning_worker_held_is_kept() -> None:
    queue = core()
    worker = FakeWorker(queue, {"a": 9})
    worker.submit("a")
    worker.run(3)
    queue.observe(WorkerDown("w"), 3.0)
    queue.observe(worker_up(held=(Held("a", 1),)), 4.0)
    (run,) = queue.plan("w").schedule
    assert run.placement == 1


def test_an_idle_worker_claims_what_waits_at_another() -> None:
    queue = core("fcfs")
    busy = FakeWorker(queue, dict.fromkeys("ab", 50), name="busy")
    busy.submit("a", "b")
    busy.step()  # lists both: one runs, one waits there
    queue.observe(worker_up("idle"), 1.0)
    assert [run.id for run in queue.plan("idle").schedule] == ["b"]
    assert [run.id for run in queue.plan("busy").schedule] == ["a"]


def short_of_memory() -> Core:
    """Six blocks: the first request holds four of them, and the second, for which there is a slot, would need three."""
    queue = core("fcfs")
    short = FakeWorker(queue, {"first": 60, "second": 30}, name="short", slots=2, blocks=6)
    short.submit("first", prompt=40)
    short.run(10)
    short.submit("second", prompt=40)
    assert [run.id for run in queue.plan("short").schedule] == ["first"]
    return queue


def test_an_idle_worker_claims_what_waits_for_memory_at_another() -> None:
    queue = short_of_memory()
    queue.observe(worker_up("idle"), 11.0)
    assert [run.id for run in queue.plan("idle").schedule] == ["second"]
    assert [run.id for run in queue.plan("short").schedule] == ["first"]


def test_what_waits_for_memory_stays_where_no_other_worker_has_it_free() -> None:
    queue = short_of_memory()
    other = FakeWorker(queue, {"other": 60}, name="other", slots=2, blocks=6)
    queue.observe(Cancelled("second"), 11.0)
    other.submit("other", prompt=40)
    other.run(10)
    other.submit("third", prompt=40)
    assert [run.id for run in queue.plan("short").schedule] == ["first"]
    assert [run.id for run in queue.plan("other").schedule] == ["other"]
    assert queue.fleet.entries["third"].home == "short"


def test_what_is_computed_of_a_request_counts_at_its_home_alone() -> None:
    """It lacks three of its four blocks there; the other worker has three, and would have to compute all of it."""
    queue = short_of_memory()
    second = Round("second", queue.fleet.entries["second"].placement, 0, 0, 0, 0, 0, 24, 0, None, True)
    queue.observe(StepDone("short", (second,), 2, 1.0), 11.0)
    queue.plan("short")
    other = FakeWorker(queue, {"other": 60}, name="other", slots=2, blocks=4)
    other.submit("other", prompt=4)
    other.step()
    assert queue.fleet.entries["second"].home == "short"


def paused_beside(prefill_token_s: float) -> Core:
    """A request of 40 tokens is paused on one worker for a shorter one that runs there; another worker has nothing."""
    queue = core("srpt-length")
    cost = replace(COST, prefill_token_s=prefill_token_s)
    busy = FakeWorker(queue, {"paused": 900, "runs": 50}, cost=cost)
    busy.submit("paused", prompt=38, predicted_tokens=900)
    busy.run(2)
    busy.submit("runs", predicted_tokens=50)
    busy.run(2)
    assert queue.fleet.entries["paused"].state is State.PAUSED
    queue.observe(worker_up("idle", cost=cost), 9.0)
    return queue


def test_a_paused_request_is_claimed_when_computing_its_kv_anew_is_quicker_than_waiting() -> None:
    assert [run.id for run in paused_beside(prefill_token_s=0.1).plan("idle").schedule] == ["paused"]


def test_a_paused_request_stays_when_waiting_is_quicker_than_computing_its_kv_anew() -> None:
    assert paused_beside(prefill_token_s=100.0).plan("idle").schedule == ()


def test_a_paused_request_is_claimed_from_behind_one_that_has_yet_to_begin() -> None:
    """What ran there was just cancelled, and another goes first now."""
    queue = paused_beside(prefill_token_s=0.1)
    queue.observe(Submitted(request("next", 9.0, predicted_tokens=20)), 9.0)
    queue.plan("w")
    queue.observe(Cancelled("runs"), 10.0)
    assert [run.id for run in queue.plan("idle").schedule] == ["paused"]


def test_what_holds_no_kv_yet_goes_to_the_worker_that_runs_it_first() -> None:
    """It is listed behind another's slots, and this one would otherwise run a request that is longer."""
    queue = core("srpt-length")
    one = FakeWorker(queue, {"a": 10, "b": 20}, name="one")
    one.submit("a", predicted_tokens=10)
    one.submit("b", predicted_tokens=20)
    one.step()
    assert queue.fleet.entries["b"].home == "one"
    other = FakeWorker(queue, {"c": 30}, name="other")
    other.submit("c", predicted_tokens=30)
    assert [run.id for run in queue.plan("other").schedule[:1]] == ["b"]


def test_a_running_request_is_never_claimed_by_another_worker() -> None:
    queue = core("fcfs")
    busy = FakeWorker(queue, {"a": 50}, name="busy")
    busy.submit("a")
    busy.step()
    queue.observe(worker_up("idle"), 1.0)
    assert queue.plan("idle").schedule == ()


def test_with_another_model_the_costs_are_those_of_its_first_worker() -> None:
    fleet = core().fleet
    fleet.attach(worker_up("first", cost=replace(COST, verify_s=0.03), slots=4), 0.0)
    fleet.detach("first", 1.0)
    fleet.forget()
    fleet.attach(worker_up("second", cost=replace(COST, verify_s=0.3), slots=32), 2.0)
    assert (fleet.known.cost.verify_s, fleet.known.slots) == (0.3, 32)
