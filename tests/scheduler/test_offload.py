"""KV in the memory of a worker's host: who goes there, what it spares, and when it is given up."""

from dataclasses import replace
from itertools import pairwise

from scheduler_service.core.core import Core
from scheduler_service.core.events import Held, StepDone, Submitted, WorkerDown
from scheduler_service.core.lifecycle import State
from scheduler_service.core.types import RequestClass
from tests.scheduler.builders import COST, FakeWorker, core, request, worker_up

DEAR_PREFILL = replace(COST, prefill_token_s=1.0, offload_block_s=0.01)


def evicting(host_blocks: int = 8) -> FakeWorker:
    """Six blocks of 16 tokens; the long request holds four of them, and the short one needs as many."""
    worker = FakeWorker(core(), {"long": 60, "short": 30}, blocks=6, host_blocks=host_blocks)
    worker.submit("long")
    worker.run(55)
    worker.submit("short", prompt=40)
    return worker


def test_kv_is_offloaded_where_the_hosts_memory_has_room_for_all_of_it() -> None:
    for host_blocks, offload, drop in ((8, ("long",), ()), (4, (), ("long",))):
        plan = evicting(host_blocks).core.plan("w")
        assert (plan.offload, plan.drop) == (offload, drop)


def test_a_request_whose_kv_is_offloaded_waits_at_home_and_owes_no_prefill() -> None:
    worker = evicting()
    worker.step()
    long = worker.core.fleet.entries["long"]
    assert (long.state, long.home, long.blocks, long.prefill_owed) == (State.WAITING, "w", 0, 0)
    assert long.offloaded == 5  # its 59 tokens, and the reserve
    assert long.resume_s == 5 * COST.offload_block_s


def test_it_runs_on_without_prefill_and_the_hosts_memory_is_free_again() -> None:
    worker = evicting()
    worker.run(40)
    assert not worker.core.fleet.entries
    worker = evicting()
    worker.run(32)  # the short one ended
    long = worker.core.fleet.entries["long"]
    assert (long.state, long.offloaded, long.prefilled) == (State.RUNNING, 0, 4)


def test_a_late_row_of_the_round_in_hand_does_not_bring_it_back() -> None:
    worker = evicting()
    row = worker._row("long", placement=1, emit=1, drafted=0)
    worker.core.plan("w")
    worker.core.observe(StepDone("w", (row,), 2, 1.0), worker.now)
    assert worker.core.fleet.entries["long"].state is State.WAITING
    assert worker.core.fleet.entries["long"].offloaded == 5


def before_the_better(host_blocks: int) -> list[str]:
    worker = FakeWorker(core(), {"holder": 60, "better": 5}, blocks=6, cost=DEAR_PREFILL, host_blocks=host_blocks)
    worker.submit("holder", prompt=40)
    worker.step()
    worker.submit("better", prompt=40, klass=RequestClass.INTERACTIVE)
    ran = worker.run(70)
    return ran[: ran.index("better")]


def test_a_copy_is_cheap_so_its_holder_need_not_run_until_the_prefill_has_paid() -> None:
    assert before_the_better(host_blocks=6) == ["holder"]  # a round, and it has been worth the copying
    assert before_the_better(host_blocks=0).count("holder") > 50  # three times 40 s of prefill are more than that


def test_nobody_is_copied_to_and_fro() -> None:
    """las would go to another after each round; a copy there and back costs as much as five rounds."""
    cost = replace(COST, offload_block_s=1.0)
    worker = FakeWorker(core("las"), {"a": 60, "b": 60}, blocks=6, cost=cost, host_blocks=6)
    worker.submit("a", "b", prompt=40)
    ran = worker.run(60)
    assert sum(one != other for one, other in pairwise(ran)) <= 60 // (3 * 4)


def beside_an_idle_worker(prefill_token_s: float) -> Core:
    """`long` is offloaded on one worker, where a shorter one runs; another has nothing to do."""
    cost = replace(COST, prefill_token_s=prefill_token_s)
    worker = FakeWorker(core(), {"long": 60, "short": 30}, blocks=6, host_blocks=8, cost=cost)
    worker.submit("long", prompt=4)
    worker.run(55)
    worker.submit("short", prompt=40)
    worker.step()
    worker.core.observe(worker_up("idle", cost=cost), worker.now)
    return worker.core


def test_offloaded_kv_is_left_for_an_idle_worker_only_if_computing_it_anew_is_quicker_than_waiting() -> None:
    assert beside_an_idle_worker(prefill_token_s=100.0).plan("idle").schedule == ()
    queue = beside_an_idle_worker(prefill_token_s=0.001)
    assert [run.id for run in queue.plan("idle").schedule] == ["long"]
    moved = queue.fleet.entries["long"]
    assert (moved.home, moved.offloaded, moved.prefill_owed) == ("idle", 0, moved.tokens)


def test_a_lost_worker_takes_its_hosts_memory_along() -> None:
    worker = evicting()
    worker.step()
    worker.core.observe(WorkerDown("w"), worker.now)
    long = worker.core.fleet.entries["long"]
    assert (long.home, long.offloaded, long.prefill_owed) == (None, 0, long.tokens)


def test_a_new_scheduler_learns_from_the_worker_what_is_offloaded() -> None:
    queue = core()
    queue.observe(Submitted(request("a")), 0.0)
    queue.observe(worker_up(held=(Held("a", 0, blocks=0, offloaded=3, prefill_owed=2),), host_blocks=4), 1.0)
    entry = queue.fleet.entries["a"]
    assert (entry.home, entry.blocks, entry.offloaded, entry.prefill_owed) == ("w", 0, 3, 2)
    assert queue.fleet.workers["w"].free_blocks == 1000
