"""What every store promises, on Redis and in memory alike."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from scheduler_service.core.beliefs import Acceptance, Expected, Length
from scheduler_service.core.lifecycle import State
from scheduler_service.core.types import Record
from scheduler_service.store import Fenced, MemoryStore, RedisStore, Store, StoreUnavailable, Verdict, Write
from scheduler_service.store.rounds import decode, encode
from tests.scheduler.builders import request


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


def record(id: str = "a", emitted: int = 0, level: int = 1, **changes: object) -> Record:
    fresh = Record(
        request=request(id, 12.5, deadline=99.5, predicted_tokens=7),
        state=State.WAITING,
        placement=3,
        emitted=emitted,
        prefilled=4,
        acceptance=Acceptance(2, 8, 2, 1, (0.5, 0.25)),
        perceptible=True,
        level=level,
        key=1.25,
        preemptions=1,
        started=13.5,
    )
    return replace(fresh, **changes)  # type: ignore[arg-type]


def tokens(id: str, start: int, *ids: int, **changes: object) -> Write:
    return Write(record(id, start + len(ids), **changes), start=start, log=encode(ids, 4, 1))  # type: ignore[arg-type]


async def created(store: Store, *ids: str) -> int:
    epoch = await store.lead(1000)
    assert await store.commit(epoch, [Write(record(id), submit=b"payload " + id.encode()) for id in ids]) == [
        Verdict.APPLIED
    ] * len(ids)
    return epoch


async def live_ids(store: Store) -> list[str]:
    return [stored.record.request.id async for stored in store.live()]


async def test_what_was_written_is_read_back(store: Store) -> None:
    epoch = await created(store, "a")
    await store.commit(epoch, [tokens("a", 0, 10, 11)])
    stored = await store.get("a")
    assert stored is not None
    assert stored.record == record("a", 2)
    assert stored.submit == b"payload a"
    assert [round.tokens for round in decode(stored.log)] == [(10, 11)]


async def test_an_unknown_request_is_none(store: Store) -> None:
    assert await store.get("nobody") is None


async def test_each_leader_has_a_higher_epoch_even_if_the_clock_went_back(store: Store) -> None:
    assert await store.lead(5000) == 5000
    assert await store.lead(4000) == 5001


async def test_an_earlier_leader_is_fenced(store: Store) -> None:
    old = await created(store, "a")
    await store.lead(2000)
    with pytest.raises(Fenced):
        await store.commit(old, [tokens("a", 0, 10)])


async def test_tokens_that_do_not_begin_where_the_output_ends_are_stale(store: Store) -> None:
    epoch = await created(store, "a")
    assert await store.commit(epoch, [tokens("a", 1, 10)]) == [Verdict.STALE]
    assert (await store.get("a")).record.emitted == 0  # type: ignore[union-attr]


async def test_a_repeated_commit_writes_once(store: Store) -> None:
    epoch = await created(store, "a")
    for _ in range(2):
        assert await store.commit(epoch, [tokens("a", 0, 10, 11)]) == [Verdict.APPLIED]
    stored = await store.get("a")
    assert stored is not None
    assert len(list(decode(stored.log))) == 1


async def test_a_repeated_ending_with_tokens_is_applied_once(store: Store) -> None:
    epoch = await created(store, "a")
    last = replace(tokens("a", 0, 10), ending=b"over")
    for _ in range(2):
        assert await store.commit(epoch, [last]) == [Verdict.APPLIED]
    assert await live_ids(store) == []


async def test_a_repeated_commit_of_a_whole_life_writes_once(store: Store) -> None:
    """Under load one commit holds a submission and many rounds; its answer may be lost after it was written."""
    epoch = await store.lead(1000)
    life = [
        Write(record(), submit=b"payload a"),
        tokens("a", 0, 10, level=2),
        Write(record(emitted=1, level=3)),
        tokens("a", 1, 11, level=4),
        replace(tokens("a", 2, 12, level=4), ending=b"over"),
    ]
    for count in (4, 4, 5, 5):
        assert await store.commit(epoch, life[:count]) == [Verdict.APPLIED] * count
        stored = await store.get("a")
        assert stored is not None
        assert [round.tokens[0] for round in decode(stored.log)] == [10, 11, 12][: count - 2]
        assert stored.record.level == 4
        assert await live_ids(store) == ["a"] * (count == 4)


async def test_what_was_learned_last_is_read_back(store: Store) -> None:
    epoch = await store.lead(1000)
    assert await store.learned() is None
    for learned in (b"first", b"\x00\xffsecond"):
        await store.save_learned(epoch, learned)
    assert await store.learned() == b"\x00\xffsecond"


async def test_an_earlier_leader_cannot_overwrite_what_was_learned(store: Store) -> None:
    old = await store.lead(1000)
    await store.save_learned(await store.lead(2000), b"new")
    with pytest.raises(Fenced):
        await store.save_learned(old, b"old")
    assert await store.learned() == b"new"


@pytest.mark.parametrize("expected", [Expected(Length(4.5, 0.75), 0.5), Expected(None, 0.25), Expected()])
async def test_what_a_predictor_said_of_a_request_stays_with_it(store: Store, expected: Expected) -> None:
    epoch = await store.lead(1000)
    await store.commit(epoch, [Write(record(request=request("a", expected=expected)), submit=b"payload a")])
    stored = await store.get("a")
    assert stored is not None
    assert stored.record.request.expected == expected


async def test_an_ended_request_submitted_anew_exists(store: Store) -> None:
    epoch = await created(store, "a")
    await store.commit(epoch, [Write(record(), ending=b"over")])
    anew = record(request=request("a", 99.0, predicted_tokens=7))
    assert await store.commit(epoch, [Write(anew, submit=b"payload a")]) == [Verdict.EXISTS]


async def test_a_repeated_submission_is_applied_another_one_exists(store: Store) -> None:
    epoch = await created(store, "a")
    assert await store.commit(epoch, [Write(record(), submit=b"payload a")]) == [Verdict.APPLIED]
    assert await store.commit(epoch, [Write(record(), submit=b"other")]) == [Verdict.EXISTS]


async def test_an_ended_request_is_not_live_but_can_be_asked_for(store: Store) -> None:
    epoch = await created(store, "a", "b")
    await store.commit(epoch, [Write(record("a", state=State.CANCELLED), ending=b"over")])
    assert await live_ids(store) == ["b"]
    stored = await store.get("a")
    assert stored is not None
    assert stored.ending == b"over"


async def test_nothing_is_written_after_the_end(store: Store) -> None:
    epoch = await created(store, "a")
    await store.commit(epoch, [Write(record("a"), ending=b"over")])
    assert await store.commit(epoch, [tokens("a", 0, 10)]) == [Verdict.STALE]


async def test_live_requests_come_highest_queue_first(store: Store) -> None:
    epoch = await created(store, "low", "high", "middle")
    levels = {"low": 5, "high": 1, "middle": 2}
    await store.commit(epoch, [Write(record(id, level=level)) for id, level in levels.items()])
    assert await live_ids(store) == ["high", "middle", "low"]


async def test_ended_requests_and_their_logs_expire(redis_url: str, namespace: str) -> None:
    import redis.asyncio as aioredis

    store = RedisStore(redis_url, namespace=namespace, keep_s=60)
    epoch = await created(store, "a")
    await store.commit(epoch, [replace(tokens("a", 0, 10), ending=b"over")])
    async with aioredis.Redis.from_url(redis_url) as client:
        for key in (store.keys.request("a"), store.keys.log("a")):
            assert 0 < await client.ttl(key) <= 60
    await store.close()


async def test_a_store_that_cannot_be_reached_says_so() -> None:
    store = RedisStore("unix:///nowhere/redis.sock")
    with pytest.raises(StoreUnavailable):
        await store.lead(1)
    await store.close()
