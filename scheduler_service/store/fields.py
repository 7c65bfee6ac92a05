"""A request as the fields of a Redis hash: one table says how each field is written and read, and what a missing one
means. Readable with redis-cli, except `means`. Nothing else reads or writes these fields.

Every record says which schema wrote it: `v` is MAJOR.MINOR. A field that is added needs a default, and raises MINOR:
older code ignores the field, newer code reads records without it. Whatever older code would misread raises MAJOR:
older code then sets such a request aside. Records without `v` are of schema 1.0, which had neither `v` nor `model`.
"""

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from scheduler_service.core.beliefs import FARTHEST, Acceptance, Expected, Length
from scheduler_service.core.lifecycle import State
from scheduler_service.core.types import Record, Request, RequestClass
from scheduler_service.store import rounds

MAJOR, MINOR = 1, 1
VERSION = f"{MAJOR}.{MINOR}"
LEVELS = 16  # as many queues as a policy may have

Value: TypeAlias = str | bytes | int


class Malformed(ValueError):
    """A record that cannot be read; the message says why."""


class Field(NamedTuple):
    """`encode` takes the attribute's value, `decode` gives it back from the stored bytes."""

    name: str  # in the hash
    attribute: str  # of Request, Record or Acceptance
    encode: Callable[[Any], Value]
    decode: Callable[[bytes], Any]
    default: Any = ...  # the value where the field is missing; ...: the request cannot be read without it

    def read(self, text: bytes | None) -> Any:
        """Raises Malformed."""
        if text is None:
            if self.default is ...:
                raise Malformed(f"its field {self.name} is missing")
            return self.default
        try:
            return self.decode(text)
        except (ValueError, TypeError, OverflowError, RecursionError, struct.error):
            raise Malformed(f"its field {self.name} is malformed: {text[:40]!r}") from None


class Table:
    """Fields of one kind of object."""

    def __init__(self, *fields: Field) -> None:
        self.fields = fields
        self._values = attrgetter(*(field.attribute for field in fields))
        self._encoders = [field.encode for field in fields]
        self._pairs: list[Value] = [part for field in fields for part in (field.name, "")]

    def encode(self, source: Any) -> list[Value]:
        """Names and values in turn, as HSET takes them."""
        pairs = self._pairs.copy()
        pairs[1::2] = [encode(value) for encode, value in zip(self._encoders, self._values(source), strict=True)]
        return pairs

    def decode(self, stored: Mapping[str, bytes]) -> dict[str, Any]:
        """By attribute. Raises Malformed."""
        return {field.attribute: field.read(stored.get(field.name)) for field in self.fields}


def _optional(encode: Callable[[Any], Value]) -> Callable[[Any], Value]:
    return lambda value: "" if value is None else encode(value)


def _if_any(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    return lambda text: decode(text) if text else None


def _count(text: bytes) -> int:
    if 0 <= (number := int(text)) < 2**32:
        return number
    raise ValueError


def _at_least_1(text: bytes) -> int:
    if number := _count(text):
        return number
    raise ValueError


def _level(text: bytes) -> int:
    if 1 <= (level := int(text)) <= LEVELS:
        return level
    raise ValueError


def _finite(text: bytes) -> float:
    if math.isfinite(number := float(text)):
        return number
    raise ValueError


def _moment(text: bytes) -> float:
    """Seconds since the Unix epoch, up to the year 9999: what a Timestamp holds."""
    if 0 <= (number := float(text)) < 253_402_300_800:
        return number
    raise ValueError


def _ordered(text: bytes) -> float:
    """Infinity comes after all others; NaN has no place in any order."""
    if math.isnan(number := float(text)):
        raise ValueError
    return number


def _of_expected(expected: Expected) -> str:
    """Location and spread of ln(tokens), and acceptance; null where there is none."""
    length = expected.length
    known = [length.location, length.spread] if length else [None, None]
    return json.dumps([*known, expected.acceptance], separators=(",", ":"))


def _to_expected(text: bytes) -> Expected:
    location, spread, acceptance = json.loads(text)
    if acceptance is not None and not 0 <= acceptance <= 1:
        raise ValueError
    if location is None is spread:
        return Expected(None, acceptance)
    if not (
        -FARTHEST <= location <= FARTHEST and 1e-3 <= spread <= 10
    ):  # far more than a predictor says; more would overflow
        raise ValueError
    return Expected(Length(location, spread), acceptance)


def _of_means(means: tuple[float, ...]) -> bytes:
    return struct.pack(f"<{len(means)}d", *means)  # text would cost too much


def _to_means(packed: bytes) -> tuple[float, ...]:
    means = struct.unpack(f"<{len(packed) // 8}d", packed)
    if not all(map(math.isfinite, means)):
        raise ValueError
    return means


REQUEST = Table(  # never changes
    Field("arrival", "arrival", repr, _moment),
    Field("prompt_tokens", "prompt_tokens", int, _count),
    Field("max_tokens", "max_tokens", int, _at_least_1),
    Field("class", "klass", int, lambda text: RequestClass(int(text)), RequestClass.DEFAULT),
    Field("deadline", "deadline", _optional(repr), _if_any(_ordered), None),
    Field("predicted_tokens", "predicted_tokens", _optional(int), _if_any(_count), None),
    Field("expected", "expected", _optional(_of_expected), _if_any(_to_expected), None),
    Field("tenant", "tenant", str, bytes.decode, ""),
)
RECORD = Table(
    Field("state", "state", lambda state: state.value, lambda text: State(text.decode()), State.WAITING),
    Field("placement", "placement", int, _count),
    Field("prefilled", "prefilled", int, _count, 0),
    Field("perceptible", "perceptible", int, lambda text: text == b"1", False),
    Field("key", "key", repr, _ordered, 0.0),
    Field("preemptions", "preemptions", int, _count, 0),
    Field("started", "started", _optional(repr), _if_any(_finite), None),
    Field("deaths", "deaths", int, _count, 0),
    Field("probation", "probation", int, _count, 0),
)
SCRIPT = Table(  # commit.lua writes these itself, with every write: it checks them
    Field("emitted", "emitted", int, _count),
    Field("level", "level", int, _level, 1),
)
ACCEPTANCE = Table(
    Field("rounds", "rounds", int, _count, 0),
    Field("drafted", "drafted", int, _count, 0),
    Field("accepted", "accepted", int, _count, 0),
    Field("rejected", "rejected", int, _count, 0),
    Field("means", "means", _of_means, _to_means, ()),
)

# Output tokens that the stored acceptance counts; it does not count those of later rounds that are in the log alone.
COUNTED = Field("counted", "emitted", int, _count, None)


def of_request(request: Request) -> list[Value]:
    """What never changes of it: names and values in turn."""
    return REQUEST.encode(request)


def of_record(record: Record) -> list[Value]:
    """What changes, except for what commit.lua writes itself: names and values in turn."""
    acceptance = ACCEPTANCE.encode(record.acceptance)
    return ["v", VERSION, COUNTED.name, record.emitted, *RECORD.encode(record), *acceptance]


def to_record(id: str, stored: Mapping[str, bytes], log: bytes) -> Record:
    """Raises Malformed if the record cannot be read, or if the log does not hold its output."""
    _check_version(stored.get("v", b"1.0"))
    request = Request(id=id, **REQUEST.decode(stored))
    changing = RECORD.decode(stored) | SCRIPT.decode(stored)
    emitted = changing["emitted"]
    try:
        logged = rounds.count(log)
    except struct.error as error:
        raise Malformed(f"its log is cut short: {error}") from error
    if logged != emitted:
        raise Malformed(f"its log holds {logged} of {emitted} output tokens")
    acceptance = Acceptance(**ACCEPTANCE.decode(stored))
    counted = COUNTED.read(stored.get(COUNTED.name))
    if counted is not None and counted < emitted:
        acceptance = _after(acceptance, log, counted)
    return Record(request=request, acceptance=acceptance, **changing)


def caught_up(record: Record, log: bytes) -> Record:
    """The record with all the output in `log`, of which it counts the beginning."""
    emitted = rounds.count(log)
    if emitted == record.emitted:
        return record
    return replace(record, emitted=emitted, acceptance=_after(record.acceptance, log, record.emitted))


def _after(acceptance: Acceptance, log: bytes, counted: int) -> Acceptance:
    """After the rounds of a log as well that come after `counted` output tokens."""
    keep_means = acceptance.keeps_means
    for round in rounds.decode(log):
        if round.start >= counted:
            count = len(round.tokens)
            acceptance = acceptance.after(round.drafted, round.accepted, count, keep_means=keep_means)
    return acceptance


def _check_version(version: bytes) -> None:
    try:
        major, _ = map(int, version.split(b"."))
    except ValueError:
        raise Malformed(f"its schema version {version!r} is malformed") from None
    if major > MAJOR:
        raise Malformed(f"schema {version.decode()} wrote it, and this scheduler reads none above {MAJOR}")
