"""Redis is killed and comes back without what it had acknowledged: a leader that lives gives it everything again."""

from collections.abc import AsyncIterator, Iterator

import pytest
import redis

from protos.v1 import types_pb2
from scheduler_service.store import RedisStore, StoreUnavailable
from scheduler_service.store.rounds import decode
from tests.conftest import RedisServer, redis_server
from tests.scheduler.live import ScriptedGateway, ScriptedWorker, scheduler
from tests.waiting import until

pytestmark = pytest.mark.redis

STOP = types_pb2.FINISH_REASON_STOP


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("r")) as running:
        yield running


@pytest.fixture
async def store(server: RedisServer) -> AsyncIterator[RedisStore]:
    made = RedisStore(server.url)
    yield made
    await made.close()


async def output(store: RedisStore, id: str) -> list[int] | None:
    """As Redis holds it; None while it cannot be asked."""
    try:
        stored = await store.get(id)
    except StoreUnavailable:
        return None
    return [token for round in decode(stored.log) for token in round.tokens] if stored else None


async def test_streams_go_on_and_redis_holds_all_of_them_after_it_lost_its_last_second(
    server: RedisServer, store: RedisStore
) -> None:
    async with scheduler(store, policy="fcfs") as (_, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target, slots=4).attach()
        await gateway.until(lambda: gateway.serving.ready)
        for id in ("runs", "waits", "ends", "cancelled"):
            await gateway.submit(id)
        await worker.until("runs", "waits", "ends", "cancelled")
        await worker.report(worker.row("runs", 0, 7), worker.row("ends", 0, 1), worker.row("cancelled", 0, 4))
        await gateway.until(lambda: len(gateway.tokens) == 3)
        server.back_up()
        await gateway.submit("new")
        await worker.report(worker.row("runs", 1, 8, 9), worker.row("ends", 1, 2, finish=STOP))
        await gateway.cancel("cancelled")
        await gateway.until(lambda: {"ends", "cancelled"} <= gateway.endings.keys() and "new" in gateway.accepted)
        server.kill()
        server.set_back()
        server.start()
        await worker.until("runs", "waits", "new")
        await worker.report(worker.row("runs", 3, 10, finish=STOP), worker.row("waits", 0, 5, finish=STOP))
        await worker.until("new")
        await worker.report(worker.row("new", 0, 6, finish=STOP))
        await gateway.until(lambda: len(gateway.endings) == 5)
        told = {"runs": [7, 8, 9, 10], "waits": [5], "ends": [1, 2], "new": [6], "cancelled": [4]}
        assert gateway.tokens == told
        assert {id: await output(store, id) for id in told} == told
        assert await store.index() == ([], [])
        await gateway.close()
        await worker.close()


@pytest.mark.parametrize("part", [1, 512])
async def test_a_redis_that_lost_everything_is_filled_again_though_nothing_happens(
    server: RedisServer, store: RedisStore, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    monkeypatch.setattr("scheduler_service.persister.MAX_WHOLE", part)
    async with scheduler(store) as (leader, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        for id in ("a", "b", "c"):
            await gateway.submit(id)
        await gateway.until(lambda: gateway.accepted >= {"a", "b", "c"})
        await worker.until("a", "b")
        await worker.report(worker.row("a", 0, 7, 8))
        await gateway.until(lambda: gateway.tokens.get("a") == [7, 8])
        server.kill()
        server.set_back()
        server.start()

        async def filled() -> bool:
            return [await output(store, id) for id in ("a", "b", "c")] == [[7, 8], [], []]

        await until(filled)
        assert await store.lead(1) == leader.epoch + 1  # its epoch too is there again
        await gateway.close()
        await worker.close()


async def test_a_request_that_ended_since_and_that_nobody_remembers_ends_once_more(
    server: RedisServer, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old copy of the data: what follows the request by its id gets its answer still."""
    monkeypatch.setattr("scheduler_service.ledger.ENDED_KEPT_S", -1.0)
    async with scheduler(store) as (_, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("a")
        await gateway.until(lambda: "a" in gateway.accepted)
        await worker.until("a")
        server.back_up()
        await worker.report(worker.row("a", 0, 7, finish=STOP))
        await gateway.until(lambda: "a" in gateway.endings)
        server.kill()
        server.set_back()
        server.start()
        worker.admitted.clear()
        while "a" not in worker.admitted:  # anew: a command of before may still be on its way
            await worker.next_command()
        await worker.report(worker.row("a", 0, 7, finish=STOP))
        await worker.until()
        second = ScriptedGateway(target)
        await second.follow("a")
        await second.until(lambda: "a" in second.endings)
        assert second.tokens["a"] == [7]
        for peer in (gateway, second, worker):
            await peer.close()


async def test_an_id_that_redis_had_forgotten_and_that_was_used_again_is_the_new_requests(
    server: RedisServer, store: RedisStore
) -> None:
    async with scheduler(store) as (_, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("a", 1)
        await worker.until("a")
        await worker.report(worker.row("a", 0, 7, finish=STOP))
        await gateway.until(lambda: "a" in gateway.endings)
        with redis.Redis.from_url(server.url) as admin:
            admin.delete(store.keys.request("a"), store.keys.log("a"))
        again = ScriptedGateway(target)
        await worker.until()
        await again.submit("a", 2)
        await again.until(lambda: "a" in again.accepted)
        server.kill()
        server.set_back()
        server.start()
        await worker.until("a")
        await worker.report(worker.row("a", 0, 8, finish=STOP))
        await again.until(lambda: "a" in again.endings or "a" in again.refused)
        assert again.tokens == {"a": [8]}
        assert await output(store, "a") == [8]
        for peer in (gateway, again, worker):
            await peer.close()


async def test_what_is_acknowledged_under_always_survives_kill_9(tmp_path_factory: pytest.TempPathFactory) -> None:
    with redis_server(tmp_path_factory.mktemp("r"), "--appendfsync", "always") as server:
        store = RedisStore(server.url)
        async with scheduler(store) as (_, target):
            gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
            await gateway.until(lambda: gateway.serving.ready)
            await gateway.submit("a")
            await worker.until("a")
            for start in range(20):
                await worker.report(worker.row("a", start, start))
            await gateway.until(lambda: len(gateway.tokens.get("a", ())) == 20)
            server.kill()
            await gateway.close()
            await worker.close()
        server.start()

        async def all_there() -> bool:
            return await output(store, "a") == list(range(20))

        await until(all_there)
        await store.close()
