"""What every store promises, on Redis and in memory alike."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import redis.asyncio as aioredis

from scheduler_service.core.beliefs import Acceptance, Expected, Length
from scheduler_service.core.lifecycle import State
from scheduler_service.core.types import Record
from scheduler_service.store import (
    Fenced,
    Index,
    LostWrites,
    MemoryStore,
    Pulse,
    RedisStore,
    Store,
    Stored,
    StoreUnavailable,
    Unreadable,
    Verdict,
    Write,
)
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


@dataclass
class Reign:
    """A leader's commits, numbered as it does."""

    store: Store
    epoch: int
    number: int = 0

    async def commit(self, *writes: Write) -> list[Verdict]:
        self.number += 1
        return await self.again(*writes)

    async def again(self, *writes: Write) -> list[Verdict]:
        return await self.store.commit(self.epoch, self.number, writes)


def submission(id: str) -> Write:
    return Write(record(id), submit=b"payload " + id.encode())


async def created(store: Store, *ids: str) -> Reign:
    reign = Reign(store, await store.lead(1000))
    assert await reign.commit(*map(submission, ids)) == [Verdict.APPLIED] * len(ids)
    return reign


async def live_ids(store: Store) -> list[str]:
    index = await store.index()
    return [*index.with_kv, *index.waiting]


class Encoded(Exception):
    """All writes of a commit are encoded; nothing is sent."""


async def output(store: Store, id: str = "a") -> list[int]:
    stored = await store.get(id)
    assert isinstance(stored, Stored)
    tokens = [token for round in decode(stored.log) for token in round.tokens]
    assert len(tokens) == stored.record.emitted
    return tokens


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


async def test_a_commit_of_many_writes_lets_others_run_while_it_is_encoded(
    redis_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_service.store.redis.ENCODED_AT_ONCE", 8)
    store, turns = RedisStore(redis_url, namespace=namespace), 0
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


async def test_an_unknown_request_is_none(store: Store) -> None:
    assert await store.get("nobody") is None


async def test_each_leader_has_a_higher_epoch_even_if_the_clock_went_back(store: Store) -> None:
    assert await store.lead(5000) == 5000
    assert await store.lead(4000) == 5001


async def test_an_earlier_leader_is_fenced(store: Store) -> None:
    old = await created(store, "a")
    await store.lead(2000)
    with pytest.raises(Fenced):
        await store.commit(old.epoch, 2, [tokens("a", 0, 10)])
    with pytest.raises(Fenced):
        await store.rewrite(old.epoch, 1, 1, [replace(submission("a"), start=0)])
    assert await output(store) == []


async def test_who_leads_is_seen_by_its_commits_until_it_steps_down(store: Store) -> None:
    assert await store.pulse() == Pulse(0, None)
    reign = await created(store, "a")
    assert await store.pulse() == Pulse(reign.epoch, 1)
    await reign.commit()
    assert await store.pulse() == Pulse(reign.epoch, 2)
    await store.step_down(reign.epoch - 1)  # another's business
    assert await store.pulse() == Pulse(reign.epoch, 2)
    await store.step_down(reign.epoch)
    assert await store.pulse() == Pulse(reign.epoch, None)


async def test_of_two_that_saw_the_same_pulse_one_leads(store: Store) -> None:
    for before in (await store.pulse(), Pulse(1000, 0)):
        assert await store.lead(1000, before) >= 1000
        with pytest.raises(Fenced):
            await store.lead(5000, before)


async def test_who_repeats_an_attempt_to_lead_finds_out_that_it_leads(store: Store) -> None:
    before = await store.pulse()
    epoch = await store.lead(1000, before, "one")  # and the answer is lost
    assert await store.lead(1001, before, "one") == epoch
    assert await store.pulse() == Pulse(epoch, 0)
    assert await store.commit(epoch, 1, []) == []
    assert await store.lead(1002, before, "one") == epoch  # the first call, which arrives late
    assert await store.pulse() == Pulse(epoch, 1)


async def test_an_attempt_to_lead_that_is_repeated_after_another_leads_is_fenced(store: Store) -> None:
    before = await store.pulse()
    epoch = await store.lead(1000, before, "one")
    other = await store.lead(1000, Pulse(epoch, 0), "two")
    with pytest.raises(Fenced):
        await store.lead(1001, before, "one")
    assert await store.pulse() == Pulse(other, 0)


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


async def test_what_was_lost_is_rewritten_whole_and_commits_go_on(store: Store) -> None:
    """The store went back to when "a" had one token, "b" had not ended, and "c" and the leader were not there."""
    ours = Reign(store, 5000, number=7)
    before = await created(store, "a", "b")
    await before.commit(tokens("a", 0, 10, level=3))
    with pytest.raises(LostWrites):
        await ours.commit()
    whole = [
        replace(tokens("a", 0, 10, 11, 12, level=2), submit=b"payload a"),
        replace(tokens("b", 0, 20), submit=b"payload b", ending=b"over"),
        submission("c"),
    ]
    last = ours.number - 1
    await store.rewrite(ours.epoch, -2, last, whole[:2])
    with pytest.raises(LostWrites):
        await ours.again()  # that was not all yet
    await store.rewrite(ours.epoch, last, -2, whole[2:])
    assert await ours.again(tokens("a", 3, 13, level=2)) == [Verdict.APPLIED]
    assert [await output(store, id) for id in "abc"] == [[10, 11, 12, 13], [20], []]
    assert await live_ids(store) == ["c", "a"]
    with pytest.raises(Fenced):
        await before.commit()


async def test_nothing_is_rewritten_over_what_a_leader_has_not_read(store: Store) -> None:
    """It took over on a primary that was one no more, and read there; the leader before went on here."""
    reign = await created(store, "a")
    read = await store.pulse()
    await reign.commit(tokens("a", 0, 10))
    whole = [replace(submission("a"), start=0)]
    with pytest.raises(Fenced):
        await store.rewrite(5000, 0, 0, whole, read)
    assert await output(store) == [10]
    await reign.commit(tokens("a", 1, 11))  # it still leads
    await store.rewrite(5000, 0, 0, whole, await store.pulse())
    assert await output(store) == []


async def test_what_a_leader_wrote_that_has_stepped_down_was_read_or_not(store: Store) -> None:
    reign = await created(store, "a")
    before = await store.pulse()
    await store.step_down(reign.epoch)
    with pytest.raises(Fenced):
        await store.rewrite(5000, 0, 0, [], before)  # it may have written more first
    await store.rewrite(5000, 0, 0, [], await store.pulse())


async def test_a_late_rewriting_undoes_no_commit_that_came_after_it(store: Store) -> None:
    """(Simulated faults, seed 601306.)"""
    reign = await created(store, "a")
    whole = [replace(submission("a"), start=0)]
    await store.rewrite(reign.epoch, 1, 1, whole)
    await store.rewrite(reign.epoch, 1, 1, whole)  # its answer was lost
    await reign.commit(tokens("a", 0, 10))
    with pytest.raises(LostWrites):
        await store.rewrite(reign.epoch, 1, 1, whole)
    assert await output(store) == [10]


async def test_a_late_last_part_of_a_rewriting_does_not_end_another(store: Store) -> None:
    """The store was lost once more before it came. (Simulated faults, seed 646214.)"""
    reign = await created(store, "a", "b")
    await store.rewrite(reign.epoch, -2, 1, [replace(submission("a"), start=0)])
    await store.rewrite(reign.epoch, -3, 1, [replace(submission("a"), start=0)])
    with pytest.raises(LostWrites):
        await store.rewrite(reign.epoch, 1, -2, [])
    with pytest.raises(LostWrites):
        await reign.commit()


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


async def test_a_leader_whose_epoch_is_not_the_stored_one_sets_nothing_aside(store: Store) -> None:
    old = await created(store, "a")
    epoch = await store.lead(2000)
    with pytest.raises(Fenced):
        await store.set_aside(old.epoch, "a", "reason")
    with pytest.raises(LostWrites):
        await store.set_aside(epoch + 1, "a", "reason")
    assert await output(store) == []


async def test_ended_requests_and_their_logs_expire(redis_url: str, namespace: str) -> None:
    store = RedisStore(redis_url, namespace=namespace, keep_s=60)
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
