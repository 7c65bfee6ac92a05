"""Workers that pack rounds: what they report is the same, in fewer rows."""

import asyncio

from laps_sd.schedbench.packing import PackingWorker, TimedGateway
from laps_sd.schedbench.peers import running
from scheduler_service.store import MemoryStore
from tests.scheduler.live import scheduler

REQUESTS, SLOTS = 12, 4


async def served(within_ms: int) -> tuple[int, int, int]:
    """Rows that were reported, rows and tokens that a gateway got, when all requests have ended."""
    async with scheduler(MemoryStore(), policy="fcfs", report_within_ms=within_ms) as (leader, target):
        worker, gateway = PackingWorker(target, 0, SLOTS), TimedGateway(target, REQUESTS)
        worker.round_s = 0.001
        worker.go.set()
        async with running([worker], [gateway]):
            await asyncio.gather(gateway.fill(2 * SLOTS), gateway.done.wait())
        assert leader.counters.tokens == gateway.tokens  # no row was stale
        assert len(gateway.latencies_s) == REQUESTS
        return worker.rows, gateway.rows, gateway.tokens


async def test_packed_rounds_are_fewer_rows_with_the_same_tokens() -> None:
    each, packed = await served(0), await served(1_000)
    assert each[2] == packed[2]
    assert packed[0] < each[0]
    assert packed[1] == each[1] == each[0]  # each round becomes one delta
