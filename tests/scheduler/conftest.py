"""Fixtures of the scheduler's tests."""

from collections.abc import AsyncIterator, Iterator

import pytest
import redis

from scheduler_service.leader import Leader
from scheduler_service.store import MemoryStore, RedisStore, Store
from tests.scheduler.live import ScriptedGateway, ScriptedWorker, Switch, scheduler
from tests.waiting import WAIT_S


@pytest.fixture
async def store(redis_url: str, namespace: str) -> AsyncIterator[Switch]:
    made = Switch(redis_url, namespace=namespace, timeout_s=WAIT_S)
    yield made
    await made.close()


@pytest.fixture
def raw(redis_url: str) -> Iterator[redis.Redis]:
    """Redis as a person reaches it, who may damage or mend what is stored."""
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture(params=["redis", "memory"])
async def each_store(request: pytest.FixtureRequest, namespace: str) -> AsyncIterator[Store]:
    """The test runs on every store there is."""
    made: Store = (
        MemoryStore()
        if request.param == "memory"
        else RedisStore(
            request.getfixturevalue("redis_url"),
            namespace=namespace,
            timeout_s=WAIT_S,
            options=request.getfixturevalue("redis_user"),
        )
    )
    yield made
    await made.close()


@pytest.fixture
async def live(store: Switch) -> AsyncIterator[tuple[Leader, ScriptedWorker, ScriptedGateway]]:
    async with scheduler(store, policy="fcfs", max_pending_steps=2) as (leader, target):
        gateway = ScriptedGateway(target)
        worker = await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        yield leader, worker, gateway
        await gateway.close()
        await worker.close()
