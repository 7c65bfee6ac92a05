"""A Redis that answers and will not write: full, demoted, short of replicas. Nothing is lost, and all goes on after it.
What a person has to mend (a permission, a password, a key of the wrong type) is told from what passes by itself."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio as aioredis

from protos.v1 import types_pb2
from scheduler_service.__main__ import take_over
from scheduler_service.config import Settings
from scheduler_service.leader import Leader
from scheduler_service.store import (
    LostWrites,
    RedisStore,
    StoreBusy,
    Stored,
    StoreFull,
    StoreRefuses,
    StoreUnavailable,
    TooFewReplicas,
    WrongType,
)
from tests.conftest import redis_server
from tests.scheduler.live import ScriptedGateway, ScriptedWorker, scheduler
from tests.scheduler.store.writes import created
from tests.scheduler.test_redis_loss import output
from tests.waiting import WAIT_S, until

pytestmark = pytest.mark.redis

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

            async def is_read() -> bool:  # not at once: connections to a server that refuses are made anew
                return await output(store, "a") == [7]

            await until(is_read)
            await gateway.heard_all()
            assert gateway.tokens["a"] == [7]
            admin.execute_command(*mends.split())
        await gateway.until(lambda: gateway.tokens["a"] == [7, 1, 2])
        await worker.report(worker.row("a", 3, 3, finish=STOP))
        await gateway.until(lambda: "a" in gateway.endings)
        assert await output(store, "a") == gateway.tokens["a"] == [7, 1, 2, 3]
        await gateway.close()
        await worker.close()
    await store.close()


FULL, ROOM = REFUSES["is full"]


async def test_a_new_leader_takes_over_while_redis_is_full_and_requests_go_on_when_it_is_not(url: str) -> None:
    store = RedisStore(url)
    async with scheduler(store, policy="fcfs") as (_, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.submit("a")
        await worker.until("a")
        await worker.report(worker.row("a", 0, 7))
        await gateway.until(lambda: gateway.tokens.get("a") == [7])
        await gateway.close()
        await worker.close()
    with redis.Redis.from_url(url) as admin:
        admin.execute_command(*FULL.split())
        async with scheduler(store, policy="fcfs") as (_, target):
            gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
            await gateway.follow("a")
            await gateway.until(lambda: gateway.tokens.get("a") == [7])
            await worker.until("a")
            await worker.report(worker.row("a", 1, 8, finish=STOP))
            admin.execute_command(*ROOM.split())
            await gateway.until(lambda: "a" in gateway.endings)
            assert await output(store, "a") == gateway.tokens["a"] == [7, 8]
            await gateway.close()
            await worker.close()
    await store.close()


async def test_a_leader_that_cannot_write_since_redis_is_full_still_shows_that_it_lives(url: str) -> None:
    """A standby that took over could write no more than it."""
    store = RedisStore(url)
    async with scheduler(store) as (leader, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        with redis.Redis.from_url(url) as admin:
            admin.execute_command(*FULL.split())
            await gateway.submit("a")
            await worker.until("a")
            before = await store.pulse()

            async def beats() -> bool:
                now = await store.pulse()
                return now.epoch == before.epoch and (now.commit or 0) > (before.commit or 0) + 2

            await until(beats)
            assert leader.persister.behind
            await gateway.heard_all()
            assert "a" not in gateway.accepted
            admin.execute_command(*ROOM.split())
        await gateway.until(lambda: "a" in gateway.accepted)
        assert await output(store, "a") == []
        await gateway.close()
        await worker.close()
    await store.close()


async def kind(store: RedisStore) -> type[Exception] | None:
    """What a commit of one write meets."""
    try:
        await store.save_learned(await store.lead(1), b"anything")
    except StoreUnavailable as error:
        return type(error)
    finally:
        await store.close()
    return None


@pytest.mark.parametrize(
    ("does", "options", "said"),
    [
        ("SET {laps-sd}:leader text", {}, WrongType),
        ("ACL SETUSER default -hset", {}, StoreRefuses),
        ("ACL SETUSER default -evalsha -eval", {}, StoreRefuses),
        ("PING", {"username": "nobody", "password": "guess"}, StoreRefuses),
        ("CONFIG SET requirepass secret", {}, StoreRefuses),
        (FULL, {}, StoreFull),
        ("CONFIG SET min-replicas-to-write 1", {}, TooFewReplicas),
        ("REPLICAOF 127.0.0.1 1", {}, StoreUnavailable),
        ("PING", {}, None),
    ],
)
async def test_what_a_person_has_to_mend_is_told_from_what_passes(
    url: str, does: str, options: dict[str, Any], said: type[Exception] | None
) -> None:
    with redis.Redis.from_url(url) as admin:
        admin.execute_command(*does.split())
    assert await kind(RedisStore(url, options=options)) is said


@pytest.mark.parametrize("command", ["hgetall", "get"])
async def test_what_its_user_may_not_read_counts_as_unreadable_nowhere(url: str, command: str) -> None:
    """Else all that waits would be set aside, and its clients told that it is lost, for want of a permission."""
    store = RedisStore(url)
    await created(store, "a")
    with redis.Redis.from_url(url) as admin:
        admin.execute_command("ACL", "SETUSER", "default", f"-{command}")
        with pytest.raises(StoreRefuses):
            await store.read(["a"])
        admin.execute_command("ACL", "SETUSER", "default", f"+{command}")
    assert isinstance(await store.get("a"), Stored)
    await store.close()


async def test_a_redis_that_runs_a_long_script_has_answered(url: str) -> None:
    """No other server leads, so nobody is sent to look for one."""
    store, client = RedisStore(url), aioredis.Redis.from_url(url)
    await client.config_set("lua-time-limit", 1)
    runs = asyncio.create_task(client.eval("while true do end", 0))

    async def busy() -> bool:
        try:
            await store.pulse()
        except StoreBusy as error:
            return error.answered
        return False

    await until(busy)
    async with aioredis.Redis.from_url(url) as admin:
        await admin.script_kill()
    await asyncio.gather(runs, return_exceptions=True)
    await client.aclose()
    await store.close()


async def test_lost_writes_are_no_refusal(url: str) -> None:
    store = RedisStore(url)
    with pytest.raises(LostWrites):
        await store.save_learned(await store.lead(1) + 1, b"anything")
    await store.close()


@pytest.mark.parametrize("key", ["leader", "with-kv", "queue:16"])
async def test_a_key_of_the_wrong_type_ends_a_take_over_at_once(url: str, key: str) -> None:
    with redis.Redis.from_url(url) as admin:
        admin.set(f"{{laps-sd}}:{key}", "text")
    store = RedisStore(url)
    with pytest.raises(WrongType, match=key):
        await take_over(Leader(Settings(_cli_parse_args=False), store), None)  # type: ignore[call-arg]
    await store.close()


async def test_a_standby_ends_with_one_sentence_that_names_a_key_of_the_wrong_type(url: str) -> None:
    with redis.Redis.from_url(url) as admin:
        admin.set("{laps-sd}:leader", "text")
    words = ("-m", "scheduler_service", "--redis-url", url, "--port", "0", "--standby")
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stderr=asyncio.subprocess.PIPE)
    async with asyncio.timeout(WAIT_S):
        _, said = await process.communicate()
    assert process.returncode == 1
    last = json.loads(said.splitlines()[-1])
    wrong = "WRONGTYPE Operation against a key holding the wrong kind of value"
    assert last["event"] == "stopped"
    assert last["reason"] == f"rename or delete what this needs, and start again: {wrong}: {{laps-sd}}:leader"
