"""What every store promises of the requests in it, on Redis and in memory alike."""

import asyncio
from dataclasses import replace

import pytest
import redis.asyncio as aioredis

from scheduler_service.core.beliefs import Expected, Length
from scheduler_service.core.lifecycle import State
from scheduler_service.store import Index, RedisStore, Store, Stored, StoreUnavailable, Unreadable, Verdict, Write
from scheduler_service.store.rounds import decode
from tests.scheduler.builders import request
from tests.scheduler.store.writes import Reign, created, live_ids, output, record, submission, tokens
from tests.waiting import WAIT_S


async def test_what_was_written_is_read_back(store: Store) -> None:
    reign = await created(store, "a")
    await reign.commit(tokens("a", 0, 10, 11))
    stored = await store.get("a")
    assert stored is not None
    assert stored.record == record("a", 2)
    assert stored.submit == b"payload a"
    assert [round.tokens for round in decode(stored.log)] == [(10, 11)]


async def test_hundreds_of_reads_at_once_are_answered_and_hold_up_no_commit(store: Store) -> None:
    epoch = await store.lead(1)
    reading = [asyncio.create_task(store.get("a")) for _ in range(300)]
    await asyncio.sleep(0)
    assert await store.commit(epoch, 1, [submission("a")]) == [Verdict.APPLIED]
    await asyncio.gather(*reading)


async def test_an_unknown_request_is_none(store: Store) -> None:
    assert await store.get("nobody") is None


async def test_what_was_learned_last_is_read_back(store: Store) -> None:
    epoch = await store.lead(1000)
    assert await store.learned() is None
    for learned in (b"first", b"\x00\xffsecond"):
        await store.save_learned(epoch, learned)
    assert await store.learned() == b"\x00\xffsecond"


@pytest.mark.parametrize("expected", [Expected(Length(4.5, 0.75), 0.5), Expected(None, 0.25), Expected()])
async def test_what_a_predictor_said_of_a_request_stays_with_it(store: Store, expected: Expected) -> None:
    reign = Reign(store, await store.lead(1000))
    await reign.commit(Write(record(request=request("a", expected=expected)), submit=b"payload a"))
    stored = await store.get("a")
    assert stored is not None
    assert stored.record.request.expected == expected


async def test_another_request_under_a_known_id_exists_and_so_does_all_that_follows_of_it(store: Store) -> None:
    reign = await created(store, "a")
    other = request("a", 99.0, predicted_tokens=7)
    writes = [Write(record(request=other), submit=b"payload a"), tokens("a", 0, 10, request=other)]
    assert await reign.commit(*writes) == [Verdict.EXISTS] * 2
    assert await reign.again(*writes) == [Verdict.EXISTS] * 2
    assert await output(store) == []


async def test_an_ended_request_is_not_live_but_can_be_asked_for(store: Store) -> None:
    reign = await created(store, "a", "b")
    await reign.commit(Write(record("a", state=State.CANCELLED), ending=b"over"))
    assert await live_ids(store) == ["b"]
    stored = await store.get("a")
    assert stored is not None
    assert stored.ending == b"over"


async def test_nothing_is_written_after_the_end(store: Store) -> None:
    reign = await created(store, "a")
    last, late = Write(record("a"), ending=b"over"), tokens("a", 0, 10)
    assert await reign.commit(last, late) == [Verdict.APPLIED, Verdict.EXISTS]
    assert await reign.commit(late) == [Verdict.EXISTS]
    assert await output(store) == []


async def test_live_requests_come_with_kv_first_then_highest_queue_first(store: Store) -> None:
    reign = await created(store, "low", "high", "middle", "runs", "ran", "ended")
    levels = {"low": 5, "high": 1, "middle": 2}
    await reign.commit(*(Write(record(id, level=level)) for id, level in levels.items()))
    runs = [Write(record(id, level=9, state=State.RUNNING)) for id in ("runs", "ran", "ended")]
    await reign.commit(*runs)
    await reign.commit(Write(record("ran", level=9)), Write(record("ended", state=State.FAILED), ending=b"over"))
    assert await store.index() == Index(["runs"], ["high", "middle", "low", "ran"])


async def test_the_model_that_a_request_runs_on_stays_with_it(store: Store) -> None:
    reign = Reign(store, await store.lead(1000))
    await reign.commit(replace(submission("a"), model="of A"), submission("b"))
    await reign.commit(tokens("a", 0, 10))
    assert [stored.model for stored in await store.read(["a", "b"]) if isinstance(stored, Stored)] == ["of A", ""]
    await store.rewrite(reign.epoch, 2, 2, [replace(tokens("a", 0, 10), submit=b"payload a", model="of A")])
    assert (await store.read(["a"]))[0].model == "of A"


async def test_a_request_set_aside_is_not_live_and_tells_why(store: Store) -> None:
    reign = await created(store, "a", "b", "runs")
    await reign.commit(replace(tokens("runs", 0, 10), record=record("runs", 1, state=State.RUNNING)))
    for id in ("a", "runs", "runs"):  # the last one again, since its answer was lost
        await store.set_aside(reign.epoch, id, f"the reason of {id}")
    assert await store.index() == Index([], ["b"])
    assert await store.read(["a", "runs"]) == [Unreadable("the reason of a"), Unreadable("the reason of runs")]


async def test_nothing_is_written_of_a_request_set_aside(store: Store) -> None:
    reign = await created(store, "a")
    await store.set_aside(reign.epoch, "a", "reason")
    other = Write(record(request=request("a", 99.0)), submit=b"another's")
    for commit in (reign.commit, reign.again):
        assert await commit(tokens("a", 0, 10), other) == [Verdict.EXISTS] * 2
    assert await store.get("a") == Unreadable("reason")


async def test_ended_requests_and_their_logs_expire(redis_url: str, namespace: str) -> None:
    store = RedisStore(redis_url, namespace=namespace, timeout_s=WAIT_S, keep_s=60)
    reign = await created(store, "a")
    await reign.commit(replace(tokens("a", 0, 10), ending=b"over"))
    async with aioredis.Redis.from_url(redis_url) as client:
        for key in (store.keys.request("a"), store.keys.log("a")):
            assert 0 < await client.ttl(key) <= 60
    await store.close()


async def test_a_store_that_cannot_be_reached_says_so() -> None:
    store = RedisStore("unix:///nowhere/redis.sock")
    with pytest.raises(StoreUnavailable):
        await store.lead(1)
    await store.close()
