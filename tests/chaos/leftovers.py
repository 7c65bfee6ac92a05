"""What must not be left when all requests have ended: on workers, in the scheduler, in Redis, among the processes."""

from collections.abc import Iterable
from contextlib import suppress

import psutil
import redis.asyncio as aioredis

from laps_sd.client import Stats
from protos.errors import RequestError
from tests.chaos.cluster import Cluster
from tests.waiting import until

SETTLE_S = 180.0  # a worker may just be starting, on a busy machine
FOR_EVER = -1  # what TTL says of a key without one
STAY = ("leader", "learned")


async def leftovers(cluster: Cluster) -> list[str]:
    """Empty: nothing. What goes away by itself within `SETTLE_S` is not counted."""
    found = ["nobody could be asked"]
    async with cluster.client() as client:

        async def nothing() -> bool:
            nonlocal found
            try:
                found = _of_scheduler(await client.stats(), len(cluster.named("worker")))
                found += await _of_redis(cluster)
            except RequestError as error:
                found = [f"{error.code.name}: {error.message}"]
            return not found

        with suppress(TimeoutError):
            await until(nothing, SETTLE_S)
    return found + list(_of_processes(cluster))


def _of_scheduler(stats: Stats, workers: int) -> list[str]:
    found = [f"{getattr(stats, state)} {state}" for state in ("waiting", "running", "paused") if getattr(stats, state)]
    if len(stats.workers) != workers:
        found.append(f"{len(stats.workers)} workers of {workers}")
    return found + [
        f"{worker.worker_id} has {worker.free_blocks} of {worker.blocks} blocks free"
        for worker in stats.workers
        if worker.free_blocks != worker.blocks
    ]


async def _of_redis(cluster: Cluster) -> list[str]:
    """Every key but two expires: requests that ended, with their logs."""
    found = []
    async with aioredis.Redis.from_url(f"unix://{cluster.redis}") as connection:
        async for key in connection.scan_iter(count=1000):
            name = key.decode()
            stays = name in [f"{{{cluster.namespace}}}:{kept}" for kept in STAY]
            if not stays and await connection.ttl(key) == FOR_EVER:
                found.append(f"in Redis for ever: {name}")
    return found


def _of_processes(cluster: Cluster) -> Iterable[str]:
    missing = set(cluster.children) - set(cluster.processes())
    if missing:
        yield f"not running: {sorted(missing)}"
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                yield f"a zombie: {process}"
        except psutil.NoSuchProcess:
            pass
