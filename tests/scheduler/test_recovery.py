"""A scheduler that starts on what earlier code left in Redis, and on records that nobody can read."""

from collections.abc import AsyncIterator, Sequence

import pytest
import redis

from protos.link.v1 import worker_link_pb2 as worker_pb
from protos.v1 import types_pb2 as types_pb
from scheduler_service.insight import stats
from scheduler_service.leader import Leader
from scheduler_service.store import RedisStore, Stored, StoreUnavailable, Unreadable
from scheduler_service.store.rounds import encode
from tests.scheduler import stored
from tests.scheduler.live import ScriptedGateway, scheduler
from tests.scheduler.restarted import all_read, leave, live
from tests.waiting import WAIT_S, until

STOP = types_pb.FINISH_REASON_STOP
CANCELLED = types_pb.FINISH_REASON_CANCELLED
DATA_LOSS = 15


@pytest.fixture
async def store(redis_url: str, namespace: str) -> AsyncIterator[RedisStore]:
    made = RedisStore(redis_url, namespace=namespace, timeout_s=WAIT_S)
    yield made
    await made.close()


async def all_set_aside(leader: Leader) -> None:
    """There was something to set aside, and it is done."""

    async def done() -> bool:
        return leader.recovery.set_aside.count > 0 and not leader.recovery.set_aside.pending

    await until(done)


async def test_the_requests_that_the_last_code_without_a_version_stored_go_on(
    store: RedisStore, raw: redis.Redis, namespace: str
) -> None:
    stored.load(raw, "schema-1.0", namespace)
    held = worker_pb.Held(request_id="runs", placement=1, output_tokens=5, blocks=1)
    async with live(store, held) as (leader, worker, gateway):
        for id in ("ended", "runs", "paused", "waits"):
            await gateway.follow(id)
        await gateway.until(lambda: "ended" in gateway.endings and len(gateway.tokens) == 3)
        assert gateway.tokens == {"ended": [1, 2], "runs": [7, 8, 9, 8, 9], "paused": [3]}
        await worker.until("runs", "paused", "waits")
        assert list(worker.admitted["runs"].tokens) == [1, 2, 3, 4, 7, 8, 9, 8, 9]
        assert worker.admitted["runs"].sampling.seed == 7
        entry = leader.core.fleet.entries["runs"]
        assert (entry.request.deadline, entry.request.tenant) == (4_102_444_800.0, "kiosk")
        assert (entry.acceptance.rounds, entry.acceptance.drafted) == (3, 12)
        assert leader.core.fleet.entries["paused"].preemptions == 1
        await worker.report(worker.row("runs", 5, 1, finish=STOP), worker.row("paused", 1, 4, finish=STOP))
        await worker.until("waits")
        await worker.report(worker.row("waits", 0, 5, finish=STOP))
        await gateway.until(lambda: len(gateway.endings) == 4)
        assert leader.recovery.set_aside.count == 0


async def test_a_record_from_before_a_field_existed_ends_no_service(store: RedisStore, raw: redis.Redis) -> None:
    await leave(store, "a", "b")
    assert raw.hdel(store.keys.request("b"), "probation")
    async with live(store) as (_, worker, _):
        await worker.until("a", "b")


@pytest.mark.parametrize("broken", ["a", "b"])  # with KV, and without
async def test_an_unreadable_request_is_set_aside_and_the_others_go_on(
    store: RedisStore, raw: redis.Redis, broken: str
) -> None:
    await leave(store, "a", "b", "c")
    raw.hset(store.keys.request(broken), "prompt_tokens", "many")
    async with live(store) as (leader, worker, gateway):
        await worker.until(*(id for id in "abc" if id != broken))
        await gateway.follow(broken)
        await gateway.until(lambda: broken in gateway.refused)
        refusal = gateway.refused[broken]
        assert refusal.code == DATA_LOSS
        assert "its field prompt_tokens is malformed: b'many'" in refusal.message
        assert (await stats(leader)).unreadable == 1
        await all_set_aside(leader)
    assert raw.smembers(store.keys.all_unreadable) == {broken.encode()}
    assert raw.hget(store.keys.unreadable(broken), "prompt_tokens") == b"many"
    async with live(store) as (leader, worker, gateway):  # which finds it no more, and still tells its client
        await all_read(leader)
        assert leader.recovery.set_aside.count == 0
        await gateway.follow(broken)
        await gateway.until(lambda: broken in gateway.refused)
        assert "b'many'" in gateway.refused[broken].message


async def test_a_person_may_mend_what_was_set_aside_and_give_it_back(
    redis_url: str, store: RedisStore, raw: redis.Redis, redis_user: dict[str, str]
) -> None:
    """As docs/explanation/reliability.md says, and as the user that it names."""
    await leave(store, "a")
    raw.hset(store.keys.request("a"), "prompt_tokens", "many")
    async with live(store) as (leader, _, _):
        await all_set_aside(leader)
    with redis.Redis.from_url(redis_url, **redis_user) as person:
        person.rename(store.keys.unreadable("a"), store.keys.request("a"))
        person.rename(store.keys.unreadable_log("a"), store.keys.log("a"))
        for key in (store.keys.request("a"), store.keys.log("a")):
            person.persist(key)
        person.hset(store.keys.request("a"), "prompt_tokens", 3)
        person.zadd(store.keys.queues[0], {"a": 0})
    async with live(store) as (_, worker, gateway):
        await gateway.follow("a")
        await worker.until("a")
        await worker.report(worker.row("a", 1, 8, finish=STOP))
        await gateway.until(lambda: "a" in gateway.endings)
        assert gateway.tokens["a"] == [7, 8]


async def test_who_followed_an_unreadable_request_before_it_was_read_hears_why(
    store: RedisStore, raw: redis.Redis
) -> None:
    await leave(store, "a", "b")
    raw.hdel(store.keys.request("b"), "placement")
    async with scheduler(store) as (_, target):
        gateway = ScriptedGateway(target)
        await gateway.follow("b")
        await gateway.until(lambda: "b" in gateway.refused)
        assert "its field placement is missing" in gateway.refused["b"].message
        await gateway.close()


async def test_a_payload_that_is_malformed_or_anothers_is_unreadable(store: RedisStore, raw: redis.Redis) -> None:
    await leave(store, "a", "b", "c")
    raw.hset(store.keys.request("b"), "submit", b"\xff\xff")
    raw.hset(store.keys.request("c"), "submit", raw.hget(store.keys.request("a"), "submit"))
    async with live(store) as (leader, _, gateway):
        for id in ("b", "c"):
            await gateway.follow(id)
        await gateway.until(lambda: len(gateway.refused) == 2)
        assert "its payload is malformed" in gateway.refused["b"].message
        assert "its payload does not belong to it" in gateway.refused["c"].message
        assert list(leader.core.fleet.entries) == ["a"]


async def test_damaged_log_probabilities_cut_no_gateways_link(store: RedisStore, raw: redis.Redis) -> None:
    """They are read when a gateway is to hear them: in the middle of its stream, or while requests are taken over."""
    await leave(store, "a", "b")
    raw.set(store.keys.log("a"), encode([7], 0, 0, b"\xff\xff\xff"))
    async with live(store) as (leader, _, gateway):
        await gateway.follow("a")
        await gateway.until(lambda: "a" in gateway.refused)
        assert gateway.refused["a"].code == DATA_LOSS
        await gateway.follow("b")
        await gateway.heard_all()
        assert list(leader.core.fleet.entries) == ["b"]


async def test_an_unreadable_request_that_is_submitted_again_is_not_run_twice(
    store: RedisStore, raw: redis.Redis
) -> None:
    await leave(store, "a", "b")
    raw.delete(store.keys.log("a"))
    async with live(store) as (leader, worker, gateway):
        await worker.until("b")
        await gateway.submit("a")
        await gateway.until(lambda: "a" in gateway.refused)
        assert gateway.refused["a"].code == DATA_LOSS
        assert list(leader.core.fleet.entries) == ["b"]


async def test_what_the_store_may_not_set_aside_ends_no_service(
    redis_url: str, namespace: str, store: RedisStore, redis_user: dict[str, str], raw: redis.Redis
) -> None:
    """As with an ACL file of before there was anything to set aside."""
    await leave(store, "a", "b")
    raw.hset(store.keys.request("a"), "state", "asleep")
    raw.execute_command("ACL", "SETUSER", redis_user["username"], "-rename")
    old_rules = RedisStore(redis_url, namespace=namespace, timeout_s=WAIT_S, options=redis_user)
    async with live(old_rules) as (leader, worker, _):
        await worker.until("b")
        await all_read(leader)
        assert isinstance(await store.get("a"), Unreadable)
    await old_rules.close()


async def test_a_cancel_of_a_request_that_cannot_be_read_yet_cuts_no_link_and_counts_when_it_is_read(
    store: RedisStore, redis_url: str, namespace: str
) -> None:
    class Away(RedisStore):
        away = True

        async def read(self, ids: Sequence[str]) -> list[Stored | Unreadable | None]:
            if self.away and "b" in ids:
                raise StoreUnavailable("away")
            return await super().read(ids)

    await leave(store, "a", "b")
    away = Away(redis_url, namespace=namespace)
    async with live(away) as (leader, _, gateway):
        await gateway.follow("b")
        await gateway.cancel("b")
        await gateway.submit("new")
        await gateway.until(lambda: "new" in gateway.accepted)
        away.away = False
        await gateway.until(lambda: "b" in gateway.endings)
        assert gateway.endings["b"].finish_reason == CANCELLED
        assert list(leader.core.fleet.entries) == ["a", "new"]
    await away.close()
