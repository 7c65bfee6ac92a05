"""A Redis that answers and will not write: full, demoted, short of replicas. Nothing is lost, all goes on after it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis

from protos.v1 import types_pb2
from scheduler_service.store import RedisStore
from tests.conftest import redis_server
from tests.scheduler.live import ScriptedGateway, ScriptedWorker, scheduler
from tests.scheduler.test_redis_loss import output
from tests.waiting import until

STOP = types_pb2.FINISH_REASON_STOP
REFUSES = {  # what makes it so, and what mends it
    "is full": ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
    "is a replica now": ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
    "lacks replicas": ("CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0"),
}


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    with redis_server(tmp_path) as server:
        yield server.url


@pytest.mark.parametrize(("trouble", "mends"), REFUSES.values(), ids=REFUSES)
async def test_what_it_will_not_write_is_not_told_and_comes_when_it_does(url: str, trouble: str, mends: str) -> None:
    store = RedisStore(url)
    async with scheduler(store, policy="fcfs", max_pending_steps=2) as (leader, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("a")
        await worker.until("a")
        await worker.report(worker.row("a", 0, 7))
        await gateway.until(lambda: gateway.tokens.get("a") == [7])
        with redis.Redis.from_url(url) as admin:
            admin.execute_command(*trouble.split())
            with pytest.raises(redis.ResponseError):
                admin.set("any", "thing")
            for start in (1, 2):
                await worker.report(worker.row("a", start, start))

            async def waits() -> bool:
                return leader.persister.full(worker.name)

            await until(waits)
            assert await output(store, "a") == [7]
            assert gateway.tokens["a"] == [7]
            admin.execute_command(*mends.split())
        await gateway.until(lambda: gateway.tokens["a"] == [7, 1, 2])
        await worker.report(worker.row("a", 3, 3, finish=STOP))
        await gateway.until(lambda: "a" in gateway.endings)
        assert await output(store, "a") == gateway.tokens["a"] == [7, 1, 2, 3]
        await gateway.close()
        await worker.close()
    await store.close()
