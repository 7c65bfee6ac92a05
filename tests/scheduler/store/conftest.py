"""Each test of this folder runs on every store there is."""

from collections.abc import AsyncIterator

import pytest

from scheduler_service.store import MemoryStore, RedisStore, Store


@pytest.fixture(params=["redis", "memory"])
async def store(request: pytest.FixtureRequest, namespace: str) -> AsyncIterator[Store]:
    made: Store = (
        MemoryStore()
        if request.param == "memory"
        else RedisStore(
            request.getfixturevalue("redis_url"), namespace=namespace, options=request.getfixturevalue("redis_user")
        )
    )
    yield made
    await made.close()
