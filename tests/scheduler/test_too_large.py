"""A fleet comes back smaller than it was: what no worker can hold any more holds up nobody, and ends."""

from scheduler_service.core.core import SETTLED_S, Core
from scheduler_service.core.events import Draining, Obeyed, Submitted, Tick, WorkerDown
from scheduler_service.core.lifecycle import State
from scheduler_service.core.types import Effect, Ended
from tests.scheduler.builders import FakeWorker, core, request, worker_up

SMALL = ["a", "b", "c", "d"]


def shrunk(policy: str = "fcfs") -> Core:
    """2,048 tokens of KV were there when `big` came; 256 are left. It came before the others."""
    queue = core(policy)
    queue.observe(worker_up("large", blocks=128), 0.0)
    queue.observe(Submitted(request("big", prompt=1200, max_tokens=600)), 0.0)
    for id in SMALL:
        queue.observe(Submitted(request(id, 1.0, prompt=10, max_tokens=20)), 1.0)
    queue.plan("large")
    queue.observe(WorkerDown("large"), 2.0)
    queue.observe(worker_up("small", slots=4, blocks=16), 3.0)
    return queue


def ended(effects: tuple[Effect, ...]) -> list[Ended]:
    return [effect for effect in effects if isinstance(effect, Ended)]


def test_nobody_waits_behind_a_request_that_fits_no_worker() -> None:
    assert sorted(run.id for run in shrunk().plan("small").schedule) == SMALL


def test_it_ends_with_a_sentence_once_no_larger_worker_has_come_for_a_while() -> None:
    queue = shrunk()
    assert not queue.observe(Tick(), 3.0 + SETTLED_S - 0.1)
    (failed,) = ended(queue.observe(Tick(), 3.0 + SETTLED_S))
    assert (failed.record.request.id, failed.record.state) == ("big", State.FAILED)
    assert failed.reason == "no worker can hold it: it may come to 1800 tokens"
    assert sorted(queue.fleet.entries) == SMALL


def test_a_larger_worker_that_comes_in_time_runs_it() -> None:
    queue = shrunk()
    queue.observe(worker_up("large", blocks=128), 9.0)
    assert not queue.observe(Tick(), 30.0)
    assert [run.id for run in queue.plan("large").schedule] == ["big", *SMALL][:2]
    assert "big" not in {run.id for run in queue.plan("small").schedule}


def test_while_all_workers_drain_no_request_ends_for_lack_of_one() -> None:
    queue = core("fcfs")
    worker = FakeWorker(queue, {"runs": 9, "waits": 9}, slots=1)
    worker.submit("runs", "waits")
    worker.step()
    queue.observe(Draining("w"), worker.now)
    assert not queue.observe(Tick(), worker.now + 2 * SETTLED_S)


def test_a_worker_that_goes_may_come_back_before_its_requests_end() -> None:
    queue = core("fcfs")
    queue.observe(worker_up("large", blocks=128), 0.0)
    queue.observe(worker_up("small", blocks=16), 0.0)
    queue.observe(Submitted(request("big", prompt=1200, max_tokens=600)), 0.0)
    queue.observe(WorkerDown("large"), 100.0)
    assert not queue.observe(Tick(), 100.0 + SETTLED_S - 0.1)
    assert ended(queue.observe(Tick(), 100.0 + SETTLED_S))


def test_where_a_large_worker_drains_its_requests_wait_for_the_next_one() -> None:
    queue = core("fcfs")
    queue.observe(worker_up("large", blocks=128), 0.0)
    queue.observe(worker_up("small", blocks=16), 0.0)
    queue.observe(Submitted(request("big", prompt=1200, max_tokens=600)), 0.0)
    queue.observe(Draining("large"), 100.0)
    assert not queue.observe(Tick(), 200.0)
    queue.observe(WorkerDown("large"), 200.0)
    assert not queue.observe(Tick(), 200.0 + SETTLED_S - 0.1)


def test_one_that_outgrows_all_workers_ends_and_the_next_one_runs() -> None:
    """It began when its memory sufficed: the length that it may come to does not keep it from running."""
    queue = core("fcfs")
    worker = FakeWorker(queue, {"grows": 500, "next": 5}, slots=1, blocks=8)
    worker.submit("grows", "next", max_tokens=500)
    while worker.step():
        if "grows" not in worker.ran[-1]:
            break
    assert worker.ran[-1] == ("next",)
    assert 100 < queue.fleet.entries["grows"].tokens <= 128
    (failed,) = ended(queue.observe(Tick(), worker.now + SETTLED_S))
    assert failed.record.request.id == "grows"


def test_one_that_outgrows_the_only_worker_ends_though_nobody_runs_after_it() -> None:
    queue = core("fcfs")
    worker = FakeWorker(queue, {"grows": 500}, blocks=8)
    worker.submit("grows", max_tokens=500)
    while queue.plan("w").schedule:
        worker.step()
    last = queue.fleet.workers["w"].planned
    assert not queue.observe(Tick(), worker.now + SETTLED_S), "the worker may still run it by an earlier plan"
    queue.observe(Obeyed("w", last, None), worker.now)
    (failed,) = ended(queue.observe(Tick(), worker.now + SETTLED_S))
    assert failed.record.request.id == "grows"


def test_one_that_outgrows_its_worker_goes_on_at_a_larger_one() -> None:
    """Which has come after it began."""
    queue = core("fcfs")
    small = FakeWorker(queue, {"grows": 500}, "small", blocks=8)
    small.submit("grows", max_tokens=500)
    small.run(40)
    large = FakeWorker(queue, {"grows": 500}, "large", blocks=64)
    assert small.run(100)[-1] == ""
    assert large.run(1) == ["grows"]
    assert queue.fleet.entries["grows"].home == "large"
