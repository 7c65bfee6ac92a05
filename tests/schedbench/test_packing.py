"""Workers that pack rounds: what they report is the same, in fewer rows."""

import asyncio

from laps_sd.schedbench.packing import PackingWorker, TimedGateway
from scheduler_service.store import MemoryStore
from tests.scheduler.live import scheduler

REQUESTS, SLOTS = 12, 4


async def served(within_ms: int) -> tuple[int, int, int]:
    """Rows that were reported, rows and tokens that a gateway got, when all requests have ended."""
    async with scheduler(MemoryStore(), policy="fcfs") as (leader, target), asyncio.TaskGroup() as tasks:
        worker, gateway = PackingWorker(target, 0, SLOTS, within_ms), TimedGateway(target, REQUESTS)
        worker.round_s = 0.001
        running = [tasks.create_task(worker.run())]
        await worker.attached.wait()
        running.append(tasks.create_task(gateway.run()))
        worker.go.set()
        filling = tasks.create_task(gateway.fill(2 * SLOTS))
        await gateway.done.wait()
        await filling
        for task in running:
            task.cancel()
        assert leader.counters.tokens == gateway.tokens  # no row was stale
        assert len(gateway.latencies_s) == REQUESTS
        return worker.rows, gateway.rows, gateway.tokens


async def test_packed_rounds_are_fewer_rows_with_the_same_tokens() -> None:
    each, packed = await served(0), await served(60_000)
    assert each[2] == packed[2]
    assert packed[0] < each[0]
    assert packed[1] == each[1] == each[0]  # each round becomes one delta
