"""A scheduler that starts on what an earlier leader left in Redis."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from protos.link.v1 import worker_link_pb2 as worker_pb
from scheduler_service.leader import Leader
from scheduler_service.store import RedisStore
from scheduler_service.worker_pool import MODEL_STAYS_S
from tests.scheduler.live import Live, ScriptedGateway, ScriptedWorker, scheduler
from tests.waiting import until


@asynccontextmanager
async def live(store: RedisStore, *held: worker_pb.Held, **changes: Any) -> AsyncIterator[Live]:
    """A leader, a worker of two slots and a gateway. The leader has begun so long ago that the model may be another."""
    async with scheduler(store, policy="fcfs", predictor="none") as (leader, target):
        leader.workers.led_since -= MODEL_STAYS_S
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target, slots=2).attach(*held, **changes)
        await gateway.until(lambda: gateway.serving.ready)
        yield leader, worker, gateway
        await gateway.close()
        await worker.close()


async def leave(store: RedisStore, *ids: str) -> None:
    """A leader that leaves these requests: the first has run, and has one token."""
    async with live(store) as (_, worker, gateway):
        for id in ids:
            await gateway.submit(id)
        await worker.until(*ids)
        await worker.report(worker.row(ids[0], 0, 7))
        await gateway.until(lambda: gateway.tokens.get(ids[0]) == [7])


async def all_read(leader: Leader) -> None:
    async def done() -> bool:
        return not leader.recovery.unread

    await until(done)
