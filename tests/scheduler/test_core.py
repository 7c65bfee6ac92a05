"""The core's decisions, one behaviour a test. Time is a number; a fake worker carries out the plans."""

from dataclasses import replace

import pytest

from scheduler_service.core.events import Cancelled, StepDone, Submitted, Tick
from scheduler_service.core.lifecycle import State
from scheduler_service.core.outlook import position, waits_s
from scheduler_service.core.types import (
    AlreadySubmitted,
    Bounds,
    Effect,
    Ended,
    Finish,
    QueueIsFull,
    RequestClass,
    counted_ids,
)
from tests.scheduler.builders import FakeWorker, core, records, request, worker_up


def advanced(effects: tuple[Effect, ...]) -> list[str]:
    """The requests of which a round counts."""
    return [id for effect in effects for id in counted_ids(effect)]


def test_fcfs_runs_one_to_its_end_before_the_next() -> None:
    worker = FakeWorker(core("fcfs"), {"long": 5, "short": 1})
    worker.submit("long", "short")
    assert worker.run(6) == ["long"] * 5 + ["short"]


@pytest.mark.parametrize(("at", "state"), [(9.0, State.CANCELLED), (9.9, State.EXPIRED), (10.1, State.EXPIRED)])
def test_a_request_that_is_cancelled_as_its_deadline_passes_expires(at: float, state: State) -> None:
    """Gateways cancel what their clients no longer wait for, and clients wait until the deadline."""
    queue = core()
    queue.observe(Submitted(request("a", 0.0, deadline=10.0)), 0.0)
    (ended,) = queue.observe(Cancelled("a"), at)
    assert isinstance(ended, Ended)
    assert ended.record.state is state


def test_under_laps_sd_a_short_request_overtakes_a_long_one() -> None:
    worker = FakeWorker(core(), {"long": 100, "short": 3})
    worker.submit("long")
    worker.run(20)
    worker.submit("short")
    assert worker.run(5) == ["short"] * 3 + ["long"] * 2
    assert worker.core.fleet.entries["long"].preemptions == 1


def test_an_equal_claim_does_not_preempt() -> None:
    worker = FakeWorker(core(), {"first": 100, "second": 100})
    worker.submit("first")
    worker.run(2)
    worker.submit("second")
    assert worker.run(2) == ["first", "first"]


def test_demotion_lets_the_next_one_of_the_first_queue_run() -> None:
    worker = FakeWorker(core("laps-sd", "window=32"), {"a": 100, "b": 100})
    worker.submit("a", "b")
    ran = worker.run(30)
    assert ran[:11] == ["a"] * 11  # prefill and ten rounds
    assert ran[11:22] == ["b"] * 11


def test_a_class_goes_before_the_next_whatever_the_policy() -> None:
    worker = FakeWorker(core("fcfs"), {"batch": 1, "default": 1, "urgent": 1})
    worker.submit("batch", klass=RequestClass.BATCH)
    worker.submit("default")
    worker.submit("urgent", klass=RequestClass.INTERACTIVE)
    assert worker.run(3) == ["urgent", "default", "batch"]


def test_a_hint_orders_perceptible_requests() -> None:
    worker = FakeWorker(core("laps-sd", "window=1"), {"long": 500, "short": 40})
    worker.submit("long", predicted_tokens=500)
    worker.submit("short", predicted_tokens=40)
    worker.run(20)
    assert worker.run(3) == ["short"] * 3


def test_the_list_is_longer_than_the_slots() -> None:
    worker = FakeWorker(core(), dict.fromkeys("abcd", 5), slots=1)
    worker.submit(*"abcd")
    assert [run.id for run in worker.core.plan("w").schedule] == ["a", "b"]


def test_a_stale_row_counts_for_nothing() -> None:
    worker = FakeWorker(core(), {"a": 10})
    worker.submit("a")
    worker.step()
    row = worker._row("a", placement=0, emit=1, drafted=0)
    assert not advanced(worker.core.observe(StepDone("w", (row,), 0, 1.0), 9.0))
    assert worker.core.fleet.entries["a"].emitted == 1


def test_tokens_that_do_not_begin_where_the_output_ends_count_for_nothing() -> None:
    worker = FakeWorker(core(), {"a": 10})
    worker.submit("a")
    worker.step()
    again = worker._row("a", placement=1, emit=1, drafted=0)
    worker.step()
    assert not advanced(worker.core.observe(StepDone("w", (again,), 0, 1.0), 9.0))


def test_cancel_ends_a_request_in_any_live_state_once() -> None:
    worker = FakeWorker(core(), {"a": 10, "b": 10})
    worker.submit("a", "b")
    worker.step()
    for id in ("a", "b"):
        (ended,) = worker.core.observe(Cancelled(id), 3.0)
        assert isinstance(ended, Ended)
        assert ended.record.state is State.CANCELLED
        assert worker.core.observe(Cancelled(id), 4.0) == ()
    assert worker.core.plan("w").schedule == ()


def test_a_deadline_expires_whatever_waits_or_runs() -> None:
    queue = core()
    queue.observe(worker_up(), 0.0)
    queue.observe(Submitted(request("soon", deadline=5.0)), 0.0)
    queue.observe(Submitted(request("later", deadline=50.0)), 0.0)
    assert queue.observe(Tick(), 4.9) == ()
    (ended,) = queue.observe(Tick(), 5.0)
    assert ended.record.request.id == "soon"
    assert ended.record.state is State.EXPIRED


def test_a_tick_ends_no_more_requests_than_it_says() -> None:
    queue = core()
    for id in ("a", "b", "c"):
        queue.observe(Submitted(request(id, deadline=5.0)), 0.0)
    ended = [[effect.record.request.id for effect in queue.observe(Tick(most=2), 6.0)] for _ in range(3)]
    assert ended == [["a", "b"], ["c"], []]


def test_the_deadlines_of_ended_requests_take_no_memory_and_are_never_sorted_out() -> None:
    queue = core()
    for number in range(100):
        queue.observe(Submitted(request(f"r{number}", deadline=1e9)), 0.0)
    for number in range(50):
        queue.observe(Cancelled(f"r{number}"), 0.0)
        assert len(queue.fleet.deadlines) == 99 - number


def test_an_id_that_is_used_again_has_a_deadline_of_its_own() -> None:
    queue = core()
    queue.observe(Submitted(request("a", deadline=5.0)), 0.0)
    queue.observe(Cancelled("a"), 1.0)
    queue.observe(Submitted(request("a", deadline=50.0)), 2.0)
    assert queue.observe(Tick(), 10.0) == ()


def test_a_full_queue_refuses_and_changes_nothing() -> None:
    queue = core(bounds=Bounds(requests=1))
    queue.observe(Submitted(request("a")), 0.0)
    with pytest.raises(QueueIsFull):
        queue.observe(Submitted(request("b")), 0.0)
    assert list(queue.fleet.entries) == ["a"]


def test_a_live_id_is_not_taken_twice() -> None:
    queue = core()
    queue.observe(Submitted(request("a")), 0.0)
    with pytest.raises(AlreadySubmitted):
        queue.observe(Submitted(request("a")), 1.0)


def test_a_restored_core_goes_on_where_the_old_one_stopped() -> None:
    old = FakeWorker(core(), {"a": 40, "b": 40})
    old.submit("a", "b")
    old.run(25)
    queue = core()
    queue.restore(records(old.core))
    for id, entry in old.core.fleet.entries.items():
        restored = queue.fleet.entries[id]
        assert restored.emitted == entry.emitted
        assert restored.acceptance == entry.acceptance
        assert restored.perceptible == entry.perceptible
        assert restored.preemptions == entry.preemptions
        assert restored.state is State.WAITING


def test_the_mean_length_of_finished_requests_becomes_the_prediction() -> None:
    worker = FakeWorker(core(), {"a": 6})
    worker.submit("a")
    worker.run(6)
    assert worker.core.fleet.known.length.predict(None, 1000) == 6


def test_position_and_wait_grow_with_the_queue() -> None:
    worker = FakeWorker(core("fcfs"), dict.fromkeys("abc", 10))
    worker.submit(*"abc", predicted_tokens=10)
    worker.step()
    assert [position(worker.core.fleet, id) for id in "abc"] == [0, 1, 2]
    running, *waiting = waits_s(worker.core.fleet, ["a", "b", "c"])
    assert running == 0 < waiting[0] < waiting[1]
    assert waits_s(worker.core.fleet, ["c"]) == waiting[1:]


def test_an_error_of_the_worker_ends_the_request_as_failed() -> None:
    worker = FakeWorker(core(), {"a": 1})
    worker.submit("a")
    plan = worker.core.plan("w")
    row = worker._row("a", plan.schedule[0].placement, 1, 0)
    failed = StepDone("w", (replace(row, finish=Finish.ERROR),), 9, 1.0)
    (ended,) = worker.core.observe(failed, 1.0)
    assert ended.record.state is State.FAILED
