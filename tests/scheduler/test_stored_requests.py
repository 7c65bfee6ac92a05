"""What of a stored request may be missing, what may be new, and what makes it unreadable. On a real Redis."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import redis

from scheduler_service.core.beliefs import Expected, Length
from scheduler_service.core.types import RequestClass
from scheduler_service.store import RedisStore, Stored, Unreadable, Verdict, Write, WrongType
from scheduler_service.store.fields import ACCEPTANCE, MAJOR, MINOR, RECORD, REQUEST, SCRIPT, Field
from tests.scheduler.builders import request
from tests.scheduler.store.writes import Reign, record, tokens
from tests.waiting import WAIT_S

TABLE = REQUEST.fields + RECORD.fields + SCRIPT.fields + ACCEPTANCE.fields
NEEDED = [field for field in TABLE if field.default is ...]
BY_DEFAULT = [field for field in TABLE if field.default is not ...]


@pytest.fixture
async def store(redis_url: str, namespace: str) -> AsyncIterator[RedisStore]:
    made = RedisStore(redis_url, namespace=namespace, timeout_s=WAIT_S)
    yield made
    await made.close()


@pytest.fixture
async def reign(store: RedisStore) -> Reign:
    """Of a leader that has stored request "a" with two tokens, and "b"."""
    everything = request(
        "a", 12.5, deadline=99.5, predicted_tokens=7, tenant="kiosk", klass=RequestClass.BATCH, expected=EXPECTED
    )
    reign = Reign(store, await store.lead(1000))
    a = record("a", request=everything, deaths=2, probation=8)
    await reign.commit(Write(a, submit=b"payload a"), Write(record("b"), submit=b"payload b"))
    await reign.commit(replace(tokens("a", 0, 10, 11), record=replace(a, emitted=2)))
    return reign


EXPECTED = Expected(Length(4.5, 0.75), 0.5)


def value(stored: Stored, field: Field) -> object:
    owner = stored.record.request if field in REQUEST.fields else stored.record
    return getattr(stored.record.acceptance if field in ACCEPTANCE.fields else owner, field.attribute)


async def readable(store: RedisStore, id: str = "a") -> Stored:
    stored = await store.get(id)
    assert isinstance(stored, Stored), stored
    return stored


async def reason(store: RedisStore) -> str:
    """Why "a" cannot be read. Whatever the reason is, it keeps nobody from reading "b"."""
    a, b = await store.read(["a", "b"])
    assert isinstance(a, Unreadable)
    assert isinstance(b, Stored)
    return a.reason


@pytest.mark.parametrize("field", BY_DEFAULT, ids=lambda field: field.name)
async def test_a_missing_field_has_its_default(store: RedisStore, raw: redis.Redis, reign: Reign, field: Field) -> None:
    """As in a record that was written before the field existed."""
    assert raw.hdel(store.keys.request("a"), field.name)
    assert value(await readable(store), field) == field.default


@pytest.mark.parametrize("name", [*(field.name for field in NEEDED), "submit"])
async def test_without_one_of_the_needed_fields_a_request_is_unreadable(
    store: RedisStore, raw: redis.Redis, reign: Reign, name: str
) -> None:
    assert raw.hdel(store.keys.request("a"), name)
    assert await reason(store) == f"its field {name} is missing"


@pytest.mark.parametrize("name", [field.name for field in TABLE if field.name not in ("perceptible", "tenant")])
async def test_a_malformed_field_is_unreadable(store: RedisStore, raw: redis.Redis, reign: Reign, name: str) -> None:
    raw.hset(store.keys.request("a"), name, "\x00no number")
    assert f"its field {name} is malformed" in await reason(store)


NONSENSE = {
    "arrival": "-1e308",
    "deadline": "nan",
    "key": "nan",
    "level": "17",
    "max_tokens": "0",
    "preemptions": "-1",
    "rounds": str(2**64),
    "expected": "[NaN, 1, 0.5]",
    "means": b"\xff" * 8,  # NaN
}


@pytest.mark.parametrize(("name", "text"), NONSENSE.items())
async def test_a_number_out_of_its_range_is_unreadable(
    store: RedisStore, raw: redis.Redis, reign: Reign, name: str, text: str | bytes
) -> None:
    """Redis refuses to order by NaN, and the core would lose its way with it."""
    raw.hset(store.keys.request("a"), name, text)
    assert f"its field {name} is malformed" in await reason(store)


@pytest.mark.parametrize(
    "text",
    [
        "[1" + 400 * "0" + ",1,null]",
        "[" * 40_000,
        "[1000,1,null]",
        "[1,0,null]",
        "[1,null,0.5]",
        "[null,1,0.5]",
        "[1,1,5]",
    ],
    ids=["huge", "deep", "far", "sure", "half", "other half", "share"],
)
async def test_an_expectation_that_no_predictor_has_is_unreadable(
    store: RedisStore, raw: redis.Redis, reign: Reign, text: str
) -> None:
    """Every leader that read it would end, and the next one too."""
    raw.hset(store.keys.request("a"), "expected", text)
    assert "its field expected is malformed" in await reason(store)


async def test_a_member_of_a_queue_that_is_no_id_is_passed_over(
    store: RedisStore, raw: redis.Redis, reign: Reign
) -> None:
    raw.zadd(store.keys.queues[0], {b"\xff\xfe": 0})
    index = await store.index()
    assert {*index.with_kv, *index.waiting} == {"a", "b"}


async def test_a_leaders_numbers_that_are_none_are_a_sentence(store: RedisStore, raw: redis.Redis) -> None:
    raw.hset(store.keys.leader, "epoch", "twelve")
    with pytest.raises(WrongType, match="has fields that are no numbers"):
        await store.pulse()


async def test_a_request_says_which_schema_wrote_it(store: RedisStore, raw: redis.Redis, reign: Reign) -> None:
    assert raw.hget(store.keys.request("a"), "v") == b"%d.%d" % (MAJOR, MINOR)


async def test_what_a_newer_minor_schema_added_is_ignored_and_kept(
    store: RedisStore, raw: redis.Redis, reign: Reign
) -> None:
    raw.hset(store.keys.request("a"), mapping={"v": f"{MAJOR}.{MINOR + 5}", "shade": "blue"})
    stored = await readable(store)
    await reign.commit(Write(replace(stored.record, preemptions=7)))
    assert (await readable(store)).record.preemptions == 7
    assert raw.hget(store.keys.request("a"), "shade") == b"blue"


@pytest.mark.parametrize("version", ["2.0", "17.3"])
async def test_a_newer_major_schema_is_unreadable(
    store: RedisStore, raw: redis.Redis, reign: Reign, version: str
) -> None:
    raw.hset(store.keys.request("a"), "v", version)
    assert await reason(store) == f"schema {version} wrote it, and this scheduler reads none above {MAJOR}"


@pytest.mark.parametrize("version", ["", "1", "one.two", "1.2.3"])
async def test_a_malformed_version_is_unreadable(
    store: RedisStore, raw: redis.Redis, reign: Reign, version: str
) -> None:
    raw.hset(store.keys.request("a"), "v", version)
    assert "schema version" in await reason(store)


async def test_a_log_that_does_not_hold_the_output_is_unreadable(
    store: RedisStore, raw: redis.Redis, reign: Reign
) -> None:
    log = raw.get(store.keys.log("a"))
    raw.set(store.keys.log("a"), log[:-1])
    assert "its log is cut short" in await reason(store)
    raw.delete(store.keys.log("a"))
    assert await reason(store) == "its log holds 0 of 2 output tokens"


@pytest.mark.parametrize("of", ["record", "log"])
async def test_a_key_of_another_type_is_unreadable(store: RedisStore, raw: redis.Redis, reign: Reign, of: str) -> None:
    key = store.keys.request("a") if of == "record" else store.keys.log("a")
    raw.delete(key)
    raw.sadd(key, "a set")
    assert f"of its {of}: WRONGTYPE" in await reason(store)
    await store.set_aside(reign.epoch, "a", "so it is")
    assert await reason(store) == "so it is"


async def test_what_is_set_aside_is_kept_as_it_was_for_a_week(
    store: RedisStore, raw: redis.Redis, reign: Reign
) -> None:
    before = raw.hgetall(store.keys.request("a")), raw.get(store.keys.log("a"))
    await store.set_aside(reign.epoch, "a", "reason")
    kept = store.keys.unreadable("a"), store.keys.unreadable_log("a")
    assert (raw.hgetall(kept[0]), raw.get(kept[1])) == before
    assert raw.smembers(store.keys.all_unreadable) == {b"a"}
    for key in (*kept, store.keys.all_unreadable):
        assert 7 * 86_400 - 60 < raw.ttl(key) <= 7 * 86_400
    assert 0 < raw.ttl(store.keys.request("a")) <= 600  # as long as its client may ask for it


async def test_no_new_request_mixes_with_a_record_that_has_lost_its_arrival(
    store: RedisStore, raw: redis.Redis, reign: Reign
) -> None:
    raw.hdel(store.keys.request("a"), "arrival")
    new = Write(record(request=request("a", 99.0)), submit=b"new")
    assert await reign.commit(new, tokens("b", 0, 10)) == [Verdict.EXISTS, Verdict.APPLIED]
    assert await reason(store) == "its field arrival is missing"
