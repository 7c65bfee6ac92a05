"""A worker that wants to end: what becomes of its requests, in the core and live."""

import pytest

from protos.link.v1 import worker_link_pb2 as worker_pb
from protos.v1 import types_pb2
from scheduler_service.core.events import Draining, WorkerDown
from scheduler_service.core.lifecycle import State
from scheduler_service.core.placement import hungriest, idle_beside_work
from scheduler_service.links.workers import WorkerLink
from scheduler_service.store import MemoryStore
from tests.scheduler.builders import FakeWorker, core
from tests.scheduler.live import ScriptedGateway, ScriptedWorker, hello, scheduler
from tests.scheduler.virtual_worker import Stream


def test_a_draining_worker_keeps_who_runs_and_gives_up_the_others() -> None:
    queue = core("fcfs")
    worker = FakeWorker(queue, dict.fromkeys("abc", 3))
    worker.submit("a", "b")
    worker.step()
    effects = queue.observe(Draining("w"), worker.now)
    assert not effects  # "b" waited, and waits
    worker.submit("c")
    assert [run.id for run in queue.plan("w").schedule] == ["a"]
    worker.run(2)
    assert "a" not in queue.fleet.entries
    assert not queue.plan("w").schedule
    other = FakeWorker(queue, dict.fromkeys("bc", 3), name="other")
    assert other.run(6) == [*"bbbccc"]


def test_a_paused_request_leaves_a_draining_worker_with_its_tokens() -> None:
    queue = core("las")
    worker = FakeWorker(queue, dict.fromkeys("ab", 90))
    worker.submit("a")
    worker.run(30)
    worker.submit("b")
    worker.run(2)
    assert queue.fleet.entries["a"].state is State.PAUSED
    (changed,) = queue.observe(Draining("w"), worker.now)
    assert (changed.record.request.id, changed.record.state, changed.record.emitted) == ("a", State.WAITING, 30)


def test_nothing_is_offered_to_a_draining_worker() -> None:
    queue = core()
    FakeWorker(queue, {}, name="draining")
    busy = FakeWorker(queue, {"a": 9}, name="busy")
    queue.observe(Draining("draining"), 0.0)
    busy.submit("a")
    assert hungriest(queue.fleet, [*queue.fleet.entries.values()]) == "busy"
    assert idle_beside_work(queue.fleet) == "busy"
    assert not queue.plan("draining").schedule


async def test_a_worker_that_drains_hands_over_and_is_let_go() -> None:
    async with scheduler(MemoryStore(), policy="fcfs") as (leader, target):
        gateway, ends = ScriptedGateway(target), await ScriptedWorker(target, "ends").attach()
        await gateway.until(lambda: gateway.serving.ready)
        for id in "ab":
            await gateway.submit(id)
        await ends.until("a", "b")
        await ends.report(ends.row("a", 0, 7))
        await ends.report(draining=True)
        other = await ScriptedWorker(target, "other").attach()
        await other.until("b")
        await ends.until("a")
        await ends.report(ends.row("a", 1, 8), draining=True)
        await ends.report(leaving=True)  # its time is up
        await ends.ended()
        await other.until("a", "b")
        assert list(other.admitted["a"].tokens) == [1, 2, 3, 7, 8]
        stop = types_pb2.FINISH_REASON_STOP
        await other.report(other.row("a", 2, 9, finish=stop), other.row("b", 0, 5, finish=stop))
        await gateway.until(lambda: len(gateway.endings) == 2)
        assert gateway.tokens == {"a": [7, 8, 9], "b": [5]}
        assert [*leader.sessions] == ["other"]
        for peer in (ends, other, gateway):
            await peer.close()


async def test_no_plan_is_made_for_a_session_that_is_closed_while_the_word_to_drain_is_written() -> None:
    async with scheduler(MemoryStore()) as (leader, _):
        told: list[str] = []

        def heard(message: worker_pb.ToWorker) -> None:
            told.append(message.WhichOneof("kind") or "")
            if told[-1] == "command":
                leader.workers.drain("w", force=True)
            elif told[-1] == "drain":
                leader.sessions["w"].close()

        stream = Stream(heard)
        stream.said.put_nowait(worker_pb.FromWorker(hello=hello()))
        await WorkerLink(lambda: leader).Attach(None, stream)
        assert told == ["welcome", "command", "drain"]


@pytest.mark.parametrize("event", [Draining("u"), WorkerDown("u", died=False)])
def test_a_slot_that_was_given_is_no_claim_to_one_elsewhere(event: Draining | WorkerDown) -> None:
    """Without preemption. The worker that was to run the first request goes before it has reported a round."""
    queue, lengths = core("fcfs", plans_lag=True), {"first": 10, "second": 10}
    FakeWorker(queue, lengths, "u").submit("first")
    queue.plan("u")
    worker = FakeWorker(queue, lengths, "v")
    worker.submit("second")
    worker.run(2)
    queue.observe(event, 3.0)
    assert worker.run(3) == ["second"] * 3
