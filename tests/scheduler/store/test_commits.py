"""What every store promises of commits: each is written once, and none without those before it."""

import asyncio
from dataclasses import replace
from unittest import mock

import pytest

from scheduler_service.core.lifecycle import State
from scheduler_service.store import LostWrites, RedisStore, Store, Verdict, Write
from scheduler_service.store.rounds import decode, encode
from tests.scheduler.store.writes import Reign, created, live_ids, output, record, submission, tokens
from tests.waiting import WAIT_S


class Encoded(Exception):
    """All writes of a commit are encoded; nothing is sent."""


async def test_a_commit_of_many_writes_lets_others_run_while_it_is_encoded(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_service.store.redis.ENCODED_AT_ONCE", 8)
    store, turns = RedisStore(redis_url, namespace=namespace, timeout_s=WAIT_S), 0
    epoch = await store.lead(1)
    with mock.patch("scheduler_service.store.redis.msgpack.packb", side_effect=Encoded):
        committing = asyncio.create_task(store.commit(epoch, 1, [submission(f"r{n}") for n in range(64)]))
        while not committing.done():
            await asyncio.sleep(0)
            turns += 1
    await asyncio.wait([committing])
    assert isinstance(committing.exception(), Encoded)
    assert turns >= 64 // 8
    await store.close()


async def test_a_round_that_changes_nothing_else_is_told_by_its_tokens(store: Store) -> None:
    reign = await created(store, "a")
    runs = tokens("a", 0, 10, 11, state=State.RUNNING)
    goes_on = replace(runs.record, emitted=3, acceptance=runs.record.acceptance.after(4, 0, 1), key=7.0)
    brief = Write(runs.record, start=2, log=encode([12], 4, 0), brief=True, tokens=1)
    assert await reign.commit(runs, brief) == [Verdict.APPLIED] * 2
    assert (stored := await store.get("a")) is not None
    assert stored.record == replace(goes_on, key=runs.record.key)
    assert [round.tokens for round in decode(stored.log)] == [(10, 11), (12,)]


@pytest.mark.parametrize("lost", [tokens("a", 1, 10), tokens("b", 0, 10), Write(record("a", 1))])
async def test_a_write_whose_past_is_not_there_writes_nothing_of_its_commit(store: Store, lost: Write) -> None:
    reign = await created(store, "a")
    with pytest.raises(LostWrites):
        await reign.commit(submission("other"), lost)
    assert await output(store) == []
    assert await store.get("other") is None


async def test_a_commit_after_one_that_is_not_there_writes_nothing(store: Store) -> None:
    reign = await created(store, "a")
    reign.number += 1
    with pytest.raises(LostWrites):
        await reign.commit(tokens("a", 0, 10))
    assert await output(store) == []


async def test_a_repeated_commit_writes_once(store: Store) -> None:
    reign = await created(store, "a")
    await reign.commit(tokens("a", 0, 10, 11))
    assert await reign.again(tokens("a", 0, 10, 11)) == [Verdict.APPLIED]
    assert await output(store) == [10, 11]


async def test_a_repeated_commit_of_a_whole_life_writes_once(store: Store) -> None:
    """Under load one commit holds a submission and many rounds; its answer may be lost after it was written."""
    reign = Reign(store, await store.lead(1000))
    life = [
        submission("a"),
        tokens("a", 0, 10, level=2),
        Write(record(emitted=1, level=3)),
        tokens("a", 1, 11, level=4),
        replace(tokens("a", 2, 12, level=4), ending=b"over"),
    ]
    for commit in (reign.commit, reign.again):
        assert await commit(*life) == [Verdict.APPLIED] * 5
        assert await output(store) == [10, 11, 12]
        assert await live_ids(store) == []
