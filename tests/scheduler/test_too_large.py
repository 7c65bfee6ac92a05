"""A fleet comes back smaller than it was: what no worker can hold any more holds up nobody, and ends."""

from scheduler_service.core.core import SETTLED_S, Core
from scheduler_service.core.events import Draining, Obeyed, Submitted, Tick, WorkerDown
from scheduler_service.core.lifecycle import State
from scheduler_service.core.placement import idle_beside_work
from scheduler_service.core.types import Effect, Ended
from scheduler_service.store import MemoryStore
from tests.scheduler.builders import FakeWorker, core, request, worker_up
from tests.scheduler.live import ScriptedGateway, ScriptedWorker, scheduler
from tests.waiting import until

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


def test_a_suspect_is_not_kept_waiting_for_a_worker_that_an_outgrown_request_leaves() -> None:
    """Which worker is vacant enough to try a suspect alone is asked after it has left."""
    queue = core("fcfs")
    lengths = {"grows": 500, "a": 3, "b": 9}
    small = FakeWorker(queue, lengths, "small", slots=2, blocks=8)
    small.submit("grows", max_tokens=500)
    while queue.plan("small").schedule:
        small.step()
    FakeWorker(queue, lengths, "dies", slots=2, blocks=8)
    small.submit("a", "b", max_tokens=9)
    assert len(queue.plan("dies").schedule) == 2
    queue.observe(WorkerDown("dies", died=True), small.now)
    small.step()  # the first of the two suspects runs here, by itself
    other = FakeWorker(queue, lengths, "other", slots=2, blocks=8)
    assert not queue.plan("other").schedule
    while "a" in queue.fleet.entries:
        small.step()
    queue.plan("small")
    assert "b" in (placed := {id: entry.home for id, entry in queue.fleet.entries.items()})
    assert placed["b"] == "small" or idle_beside_work(queue.fleet) == other.name, "nobody would plan for it"


async def outgrow(worker: ScriptedWorker) -> None:
    """Run the request `grows` until the worker of a single block has no room for another round, and is told to run
    nobody. It fills the memory, so the answer to that has no free blocks to tell."""
    await worker.until("grows")
    for start in (0, 5):  # behind a prompt of three tokens; a block has 16
        await worker.report(worker.row("grows", start, *[7] * 5, blocks=1), command_seq=worker.command.seq)
    command = await worker.until()
    await worker.report(command_seq=command.seq, free_blocks=0)


async def test_a_live_worker_that_answers_that_it_runs_nobody_runs_no_outgrown_request() -> None:
    async with scheduler(MemoryStore(), policy="fcfs") as (leader, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach(blocks=1)
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("grows", 1, 2, 3)
        await outgrow(worker)

        async def homeless() -> bool:
            return [entry.request.id for entry in leader.core.fleet.homeless()] == ["grows"]

        await until(homeless)  # so it ends once the fleet has settled
        for peer in (worker, gateway):
            await peer.close()


async def test_a_live_outgrown_request_goes_on_at_a_larger_worker_that_is_idle() -> None:
    async with scheduler(MemoryStore(), policy="fcfs") as (_, target):
        gateway, small = ScriptedGateway(target), await ScriptedWorker(target, "small").attach(blocks=1)
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("grows", 1, 2, 3)
        await small.until("grows")
        large = await ScriptedWorker(target, "large").attach()
        await large.next_command()
        await outgrow(small)
        await large.until("grows")
        for peer in (small, large, gateway):
            await peer.close()
