"""A worker that beats but owes a round is given up; one that waits for the scheduler, or for memory, is not."""

import asyncio

from protos.link.v1 import worker_link_pb2 as pb
from protos.v1 import types_pb2
from scheduler_service import reports
from scheduler_service.session import WorkerSession
from scheduler_service.store import MemoryStore
from tests.scheduler.live import ScriptedGateway, ScriptedWorker, hello, scheduler

LAG = 3


def session(**command: object) -> WorkerSession:
    made = WorkerSession("w", "s", sent={})
    made.commanded(pb.StepCommand(**command), 1)  # type: ignore[arg-type]
    return made


def reported(session: WorkerSession, report: pb.StepReport) -> None:
    step, _ = reports.read("w", report)
    session.count(report, step)


RUNS = {"schedule": [pb.Run(request_id="a")]}
RAN = pb.Row(request_id="a")
SKIPPED = pb.Row(request_id="a", skipped=pb.SKIP_NO_BLOCKS)


def test_who_was_told_whom_to_run_owes_a_round() -> None:
    assert not session().wait(1, LAG)
    owing = session(**RUNS)
    assert [owing.wait(1, LAG) for _ in range(3)] == [1, 2, 3]
    owing.commanded(pb.StepCommand(schedule=[pb.Run(request_id="b")]), 1)  # a further command is no excuse
    assert owing.wait(1, LAG) == 4


def test_a_report_pays_and_the_next_round_is_owed_from_then_on() -> None:
    owing = session(**RUNS)
    owing.wait(5, LAG)
    reported(owing, pb.StepReport(step=1, rows=[RAN]))
    assert owing.wait(1, LAG) == 1


def test_who_may_not_run_ahead_any_further_owes_nothing() -> None:
    """While the store is away no command is sent."""
    far = session(**RUNS)
    reported(far, pb.StepReport(step=LAG, rows=[RAN]))
    assert not far.wait(1, LAG)
    far.commanded(pb.StepCommand(seen_step=LAG, **RUNS), 1)
    assert far.wait(1, LAG)


def test_a_worker_to_which_a_command_is_due_owes_nothing() -> None:
    """All that it was told to run may have ended, and while the store is away no command is sent."""
    done = session(**RUNS)
    reported(done, pb.StepReport(step=1, rows=[RAN]))
    done.wake.set()
    assert not done.wait(1, LAG)
    done.wake.clear()
    assert done.wait(1, LAG) == 1


def test_a_command_that_is_due_pays_no_debt() -> None:
    """Requests that expire where a device hangs have commands sent there."""
    owing = session(**RUNS)
    owing.wait(5, LAG)
    owing.wake.set()
    assert owing.wait(1, LAG) == 5
    owing.wake.clear()
    assert owing.wait(1, LAG) == 6


def test_who_got_nowhere_owes_nothing_until_something_changes() -> None:
    full = session(**RUNS)
    reported(full, pb.StepReport(step=1, rows=[SKIPPED]))
    full.commanded(pb.StepCommand(seen_step=1, **RUNS), 1)
    assert not full.wait(1, LAG)
    full.commanded(pb.StepCommand(seen_step=1, forget=["b"], **RUNS), 1)
    assert full.wait(1, LAG)


async def test_a_worker_that_beats_but_owes_a_round_loses_its_requests_to_another() -> None:
    async with scheduler(MemoryStore(), step_timeout_s=1.0, worker_timeout_s=3600) as (_, target):
        gateway, hangs = ScriptedGateway(target), await ScriptedWorker(target, "hangs").attach()
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("a")
        await hangs.until("a")
        await hangs.report(hangs.row("a", 0, 7))
        beats = asyncio.create_task(beat(hangs))
        other = await ScriptedWorker(target, "other").attach()
        await other.until("a")
        assert list(other.admitted["a"].tokens) == [1, 2, 3, 7]
        await other.report(other.row("a", 1, 8, finish=types_pb2.FINISH_REASON_STOP))
        await gateway.until(lambda: "a" in gateway.endings)
        assert gateway.tokens["a"] == [7, 8]
        beats.cancel()
        for peer in (hangs, other, gateway):
            await peer.close()


async def test_a_round_is_owed_no_longer_for_prompts_that_the_workers_memory_cannot_hold() -> None:
    """Nobody cuts prompts in chunks there, and the longest round computes what fits into 64 blocks of 16 tokens."""
    async with scheduler(MemoryStore(), step_timeout_s=60.0, prefill_chunk=2**31) as (leader, _):
        owing = await leader.attach(hello(cost=pb.CostProfile(prefill_token_s=0.001)))
        owing.commanded(pb.StepCommand(**RUNS), 1)
        owing.wake.clear()
        leader.workers.close_hung(60.0)
        assert not owing.closed.is_set()
        leader.workers.close_hung(15.0)
        assert owing.closed.is_set()


async def beat(worker: ScriptedWorker) -> None:
    """Its event loop lives, whatever its device does."""
    while True:
        worker.step_no -= 1
        await worker.report(step=worker.step_no)
        await asyncio.sleep(0.05)
