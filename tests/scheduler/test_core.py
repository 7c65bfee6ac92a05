"""The core's decisions, one behaviour a test. Time is a number; a fake worker carries out the plans."""

from dataclasses import replace

import pytest

from scheduler_service.core.core import Core
from scheduler_service.core.entry import WORTH
from scheduler_service.core.lifecycle import State
from scheduler_service.core.outlook import position, waits_s
from scheduler_service.core.types import (
    AlreadySubmitted,
    Bounds,
    Cancelled,
    Effect,
    Ended,
    Finish,
    Held,
    QueueIsFull,
    RequestClass,
    Round,
    StepDone,
    Submitted,
    Tick,
    WorkerDown,
    counted_ids,
)
from tests.scheduler.builders import COST, FakeWorker, core, records, request, worker_up


def advanced(effects: tuple[Effect, ...]) -> list[str]:
    """The requests of which a round counts."""
    return [id for effect in effects for id in counted_ids(effect)]


def test_fcfs_runs_one_to_its_end_before_the_next() -> None:
    worker = FakeWorker(core("fcfs"), {"long": 5, "short": 1})
    worker.submit("long", "short")
    assert worker.run(6) == ["long"] * 5 + ["short"]


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


def test_the_kv_of_the_lowest_claim_is_dropped_when_memory_runs_out() -> None:
    """Six blocks of 16 tokens; the long request holds four of them and so does the short one."""
    worker = FakeWorker(core(), {"long": 60, "short": 30}, blocks=6)
    worker.submit("long")
    worker.run(55)
    worker.submit("short", prompt=40)
    assert worker.core.plan("w").drop == ("long",)
    assert worker.core.fleet.entries["long"].state is State.WAITING


def test_who_waits_for_memory_lets_its_holder_run_until_the_prefill_has_paid() -> None:
    """A prompt of 40 tokens at a tenth of a second each; then rounds of a second."""
    worker = FakeWorker(core(), {"holder": 60, "better": 5}, blocks=6, cost=replace(COST, prefill_token_s=0.1))
    worker.submit("holder", prompt=40)
    worker.step()
    worker.submit("better", prompt=40, klass=RequestClass.INTERACTIVE)
    ran = worker.run(40)
    assert ran.index("better") >= WORTH * 40 * 0.1
    assert "" not in ran[: ran.index("better")]


def test_a_round_in_hand_does_not_bring_back_memory_that_was_given_away() -> None:
    """The plan that drops it is made before its last round is reported."""
    worker = FakeWorker(core(), {"long": 60, "short": 30}, blocks=6)
    worker.submit("long")
    worker.run(55)
    placement = worker.core.fleet.entries["long"].placement
    worker.submit("short", prompt=40)
    assert worker.core.plan("w").drop == ("long",)
    late = Round("long", placement, worker.core.fleet.entries["long"].emitted, 1, 4, 0, 0, 0, 4)
    worker.core.observe(StepDone("w", (late,), 2, 1.0), worker.now)
    assert worker.core.fleet.entries["long"].blocks == 0
    assert worker.core.fleet.entries["long"].state is State.WAITING


def test_memory_is_never_taken_from_a_better_claim() -> None:
    """Six blocks: the first holds four of them, and the second would need three."""
    worker = FakeWorker(core("fcfs"), {"first": 60, "second": 30}, slots=2, blocks=6)
    worker.submit("first", prompt=40)
    worker.run(10)
    worker.submit("second", prompt=40)
    plan = worker.core.plan("w")
    assert plan.drop == ()
    assert [run.id for run in plan.schedule] == ["first"]


def test_of_two_that_fill_all_memory_the_lower_claim_gives_way() -> None:
    """Six blocks, three each, and both in the slots: neither could grow if neither gave way."""
    worker = FakeWorker(core("fcfs"), {"first": 60, "second": 60}, slots=2, blocks=6)
    worker.submit("first", "second")
    worker.run(40)
    assert list(worker.resident) == ["first"]
    assert worker.ran[-1] == ("first",)


def test_the_best_claim_gets_all_memory_when_its_reserve_would_not_fit() -> None:
    """Six blocks, all held by the first; the second needs as many, and would like a reserve beyond them."""
    worker = FakeWorker(core(), {"first": 92, "second": 2}, slots=2, blocks=6)
    worker.submit("first", prompt=4)
    worker.run(85)
    worker.submit("second", prompt=90, klass=RequestClass.INTERACTIVE)
    worker.step()
    assert worker.ran[-1] == ("second",)
    assert "first" not in worker.resident


@pytest.mark.parametrize("foresight", [False, True])
def test_with_foresight_nobody_begins_who_would_be_dropped(foresight: bool) -> None:
    """Six blocks, of which each comes to need four."""
    worker = FakeWorker(core("fcfs", foresight=foresight), {"first": 60, "second": 60}, slots=2, blocks=6)
    worker.submit("first", "second", predicted_tokens=60, max_tokens=60)
    worker.run(130)
    assert not worker.core.fleet.entries
    served = [number for number, ids in enumerate(worker.ran) if "second" in ids]
    at_a_stretch = served == list(range(served[0], served[0] + 60))
    assert at_a_stretch == foresight


def test_with_foresight_a_short_one_begins_where_a_long_one_must_wait() -> None:
    """It is over before the memory that the first will need is missing."""
    worker = FakeWorker(core("gittins", foresight=True), {"first": 60, "long": 60, "short": 5}, slots=3, blocks=6)
    for id, tokens in worker.lengths.items():
        worker.submit(id, predicted_tokens=tokens, max_tokens=tokens)
    worker.step()
    assert set(worker.ran[-1]) == {"first", "short"}


def test_one_shortage_of_memory_is_paid_for_once() -> None:
    """What one plan drops is free for the next, which may be made before the worker's next report."""
    worker = FakeWorker(core("fcfs"), {"first": 90, "second": 60, "third": 60}, slots=3, blocks=6)
    worker.submit("first", "second", "third")
    worker.run(11)
    assert worker._free() == 3
    worker.core.fleet.workers["w"].free_blocks = 0
    drops = [worker.core.plan("w").drop for _ in range(3)]
    assert drops == [("third",), (), ()]


def test_a_request_that_lost_its_kv_finishes_all_the_same() -> None:
    worker = FakeWorker(core(), {"long": 60, "short": 30}, blocks=6)
    worker.submit("long")
    worker.run(55)
    worker.submit("short", prompt=40)
    worker.run(40)
    assert not worker.core.fleet.entries


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
