"""Stored requests of another model: none is continued by this one, and none waits for ever."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Any
from unittest.mock import AsyncMock

import pytest
import redis

from protos.errors import BadInput, NotServing
from protos.link.v1 import worker_link_pb2 as worker_pb
from protos.v1 import types_pb2 as types_pb
from scheduler_service.config import Settings
from scheduler_service.leader import Leader
from scheduler_service.other_model import OtherModel
from scheduler_service.store import RedisStore, Stored, StoreUnavailable, Unreadable
from scheduler_service.worker_pool import MODEL_STAYS_S
from tests.scheduler.live import MODEL, ScriptedGateway, ScriptedWorker, hello, scheduler
from tests.scheduler.restarted import all_read, leave, live
from tests.waiting import WAIT_S

STOP, ERROR = types_pb.FINISH_REASON_STOP, types_pb.FINISH_REASON_ERROR


@pytest.fixture
async def store(redis_url: str, namespace: str) -> AsyncIterator[RedisStore]:
    made = RedisStore(redis_url, namespace=namespace, timeout_s=WAIT_S)
    yield made
    await made.close()


def other_model(fingerprint: str = "g") -> Any:
    changed = type(MODEL)()
    changed.CopyFrom(MODEL)
    changed.fingerprint = fingerprint
    return changed


async def test_another_model_continues_no_stored_request_and_nobody_waits_behind_it(store: RedisStore) -> None:
    await leave(store, "a", "b")
    async with live(store, model=other_model()) as (leader, worker, gateway):
        await gateway.submit("new")
        await worker.until("new")
        for id in ("a", "b"):
            await gateway.follow(id)
        await gateway.until(lambda: len(gateway.endings) == 2)
        for id, tokens in {"a": [7], "b": []}.items():
            assert gateway.endings[id].finish_reason == ERROR
            assert gateway.endings[id].message == "it was submitted for model f; the workers now run model g"
            assert gateway.tokens[id] == tokens
        assert list(leader.core.fleet.entries) == ["new"]
        await worker.report(worker.row("new", 0, 5, finish=STOP))
        await gateway.until(lambda: "new" in gateway.endings)
    assert await store.index() == ([], [])


@asynccontextmanager
async def left_waiting(store: RedisStore, id: str) -> AsyncIterator[tuple[Leader, str, ScriptedGateway]]:
    """A leader, its address and a gateway; the only worker has gone, and this request waits."""
    async with live(store) as (leader, worker, gateway):
        await gateway.submit(id)
        await worker.until(id)
        await worker.close()
        await gateway.until(lambda: not gateway.serving.ready)
        yield leader, worker.target, gateway


async def test_when_the_last_worker_has_been_gone_for_long_one_of_another_model_may_come(store: RedisStore) -> None:
    async with left_waiting(store, "a") as (leader, target, gateway):
        leader.durable.clock = lambda: time.time() + MODEL_STAYS_S
        other = await ScriptedWorker(target, "other").attach(model=other_model())
        await gateway.until(lambda: "a" in gateway.endings)
        assert gateway.endings["a"].message == "it was submitted for model f; the workers now run model g"
        await gateway.until(lambda: gateway.serving.model.fingerprint == "g")
        await gateway.submit("new")
        await other.until("new")
        assert list(leader.core.fleet.entries) == ["new"]
        await other.close()


async def test_a_worker_of_another_model_that_dies_while_it_is_asked_for_its_tokenizer_ends_no_request(
    store: RedisStore,
) -> None:
    async with left_waiting(store, "a") as (leader, target, _):
        leader.durable.clock = lambda: time.time() + MODEL_STAYS_S
        died = AsyncMock(side_effect=BadInput("tokenizer_part", "none came"))
        with pytest.raises(BadInput, match="none came"):
            await leader.attach(hello("other", model=other_model(), tokenizer_bytes=9), died)
        own = await ScriptedWorker(target, "own").attach()
        await own.until("a")
        await own.close()


async def test_live_requests_wait_for_workers_of_their_model_that_have_just_gone(store: RedisStore) -> None:
    async with left_waiting(store, "a") as (leader, target, _):
        with pytest.raises(BadInput, match="other files"):
            await leader.attach(worker_pb.Hello(worker_id="other", model=other_model()))
        again = await ScriptedWorker(target, "again").attach()
        await again.until("a")
        await again.close()


@pytest.mark.parametrize("runs", [True, False])
async def test_after_a_change_of_leaders_they_wait_for_workers_of_their_model_as_well(
    store: RedisStore, runs: bool
) -> None:
    """Those with KV are read when the leader begins, and one of the others when a worker comes."""
    async with nullcontext() if runs else left_waiting(store, "a"):
        if runs:
            await leave(store, "a")
    leader = Leader(Settings(_cli_parse_args=False), store)  # type: ignore[call-arg]
    await leader.lead()
    assert bool(leader.recovery.unread) is not runs
    with pytest.raises(NotServing, match="live requests wait for workers of model f"):  # it comes again
        await leader.attach(hello("other", model=other_model()))
    await leader.attach(hello("own"))
    assert list(leader.core.fleet.entries) == ["a"]
    leader.persisting.cancel()
    await asyncio.gather(leader.persisting, return_exceptions=True)


async def test_no_worker_is_taken_while_it_cannot_be_read_which_model_is_waited_for(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with left_waiting(store, "a"):
        pass
    leader = Leader(Settings(_cli_parse_args=False), store)  # type: ignore[call-arg]
    await leader.lead()
    with monkeypatch.context() as patched:
        patched.setattr(store, "read", AsyncMock(side_effect=StoreUnavailable("away")))
        with pytest.raises(NotServing, match="cannot be read yet"):
            await leader.attach(hello("other", model=other_model()))
    await leader.attach(hello("own"))
    assert list(leader.core.fleet.entries) == ["a"]
    leader.persisting.cancel()
    await asyncio.gather(leader.persisting, return_exceptions=True)


async def test_a_model_change_that_is_broken_off_is_completed_by_the_next_worker() -> None:
    failed: list[str] = []
    change = OtherModel(lambda id, message: failed.append(id), lambda: {str(n): "f" for n in range(100)})
    first = asyncio.create_task(change.serve("g"))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert 0 < len(failed) < 100
    await change.serve("g")
    assert len(failed) == 100


async def test_of_two_first_workers_with_different_models_one_is_refused(store: RedisStore) -> None:
    await leave(store, "a")
    async with scheduler(store) as (leader, _):
        await all_read(leader)
        leader.workers.led_since -= MODEL_STAYS_S
        like: Any = {"slots": 1, "blocks": 64, "block_tokens": 16, "cost": worker_pb.CostProfile(verify_s=0.01)}
        hellos = (worker_pb.Hello(worker_id=name, model=other_model(name), **like) for name in ("g", "h"))
        results = await asyncio.gather(*map(leader.attach, hellos), return_exceptions=True)
        (refused,) = [result for result in results if isinstance(result, BaseException)]
        assert "this scripted has other files" in str(refused)


async def test_a_request_of_another_model_ends_also_if_it_is_read_after_the_workers_came(
    store: RedisStore, redis_url: str, namespace: str
) -> None:
    class Gated(RedisStore):
        opened = asyncio.Event()

        async def read(self, ids: Sequence[str]) -> list[Stored | Unreadable | None]:
            if "b" in ids:
                await self.opened.wait()
            return await super().read(ids)

    await leave(store, "a", "b")
    gated = Gated(redis_url, namespace=namespace)
    async with live(gated, model=other_model()) as (leader, _, gateway):
        await gateway.follow("b")
        gated.opened.set()
        await gateway.until(lambda: "b" in gateway.endings)
        assert gateway.endings["b"].finish_reason == ERROR
        assert not leader.core.fleet.entries
    await gated.close()


async def test_a_request_of_which_no_model_is_known_runs_on_whichever_there_is(
    store: RedisStore, raw: redis.Redis
) -> None:
    """It was stored before fingerprints were."""
    await leave(store, "a")
    raw.hdel(store.keys.request("a"), "model")
    async with live(store, model=other_model()) as (_, worker, _):
        await worker.until("a")


async def test_tokens_of_another_models_tokenizer_are_refused(store: RedisStore) -> None:
    """A gateway sends again what was not acknowledged; by then workers may run another model."""
    async with live(store, model=other_model()) as (_, worker, gateway):
        for id, fingerprint in {"old": "f", "new": "g"}.items():
            await gateway.submit(id, model_fingerprint=fingerprint)
        await gateway.until(lambda: "new" in gateway.accepted and "old" in gateway.refused)
        assert gateway.refused["old"].message == "the model has changed since the request was sent"
        await worker.until("new")
