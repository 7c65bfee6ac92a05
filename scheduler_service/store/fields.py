"""A record as the fields of a Redis hash, and back: readable with redis-cli, but for `means`. Nothing else reads or
writes them."""

import json
import struct
from collections.abc import Mapping
from typing import TypeAlias

from scheduler_service.core.beliefs import Acceptance, Expected, Length
from scheduler_service.core.lifecycle import State
from scheduler_service.core.types import Record, Request, RequestClass
from scheduler_service.store.rounds import decode

Fields: TypeAlias = dict[str, str | bytes | int]


def of_request(request: Request) -> Fields:
    """What never changes."""
    return {
        "arrival": of_arrival(request),
        "prompt_tokens": request.prompt_tokens,
        "max_tokens": request.max_tokens,
        "class": int(request.klass),
        "deadline": _optional(request.deadline),
        "predicted_tokens": _optional(request.predicted_tokens),
        "expected": _of_expected(request.expected),
        "tenant": request.tenant,
    }


def of_arrival(request: Request) -> str:
    """With its id it tells a request from any other."""
    return repr(request.arrival)


def of_record(record: Record) -> Fields:
    """What changes. `emitted` and `level` are written by the script: it checks them."""
    acceptance = record.acceptance
    return {
        "state": record.state.value,
        "placement": record.placement,
        "rounds": acceptance.rounds,
        "prefilled": record.prefilled,
        "drafted": acceptance.drafted,
        "accepted": acceptance.accepted,
        "rejected": acceptance.rejected,
        "counted": record.emitted,
        "means": struct.pack(f"<{len(acceptance.means)}d", *acceptance.means),  # text would cost too much
        "perceptible": int(record.perceptible),
        "key": repr(record.key),
        "preemptions": record.preemptions,
        "started": _optional(record.started),
        "deaths": record.deaths,
        "probation": record.probation,
    }


def to_record(id: str, fields: Mapping[str, bytes], log: bytes) -> Record:
    """Raises KeyError, ValueError or struct.error if a field or the log is missing or malformed."""
    request = Request(
        id=id,
        arrival=float(fields["arrival"]),
        prompt_tokens=int(fields["prompt_tokens"]),
        max_tokens=int(fields["max_tokens"]),
        klass=RequestClass(int(fields["class"])),
        deadline=float(text) if (text := fields["deadline"]) else None,
        predicted_tokens=int(text) if (text := fields["predicted_tokens"]) else None,
        expected=_to_expected(text) if (text := fields["expected"]) else None,
        tenant=fields["tenant"].decode(),
    )
    acceptance = Acceptance(
        rounds=int(fields["rounds"]),
        drafted=int(fields["drafted"]),
        accepted=int(fields["accepted"]),
        rejected=int(fields["rejected"]),
        means=tuple(mean for (mean,) in struct.iter_unpack("<d", fields["means"])),
    )
    counted = int(fields.get("counted", fields["emitted"]))  # output tokens whose rounds `acceptance` counts
    for round in decode(log) if counted < int(fields["emitted"]) else ():
        if round.start >= counted:
            acceptance = acceptance.after(round.drafted, round.accepted, len(round.tokens))
    return Record(
        request=request,
        state=State(fields["state"].decode()),
        placement=int(fields["placement"]),
        emitted=int(fields["emitted"]),
        prefilled=int(fields["prefilled"]),
        acceptance=acceptance,
        perceptible=fields["perceptible"] == b"1",
        level=int(fields["level"]),
        key=float(fields["key"]),
        preemptions=int(fields["preemptions"]),
        started=float(text) if (text := fields["started"]) else None,
        deaths=int(fields["deaths"]),
        probation=int(fields["probation"]),
    )


def _of_expected(expected: Expected | None) -> str:
    """Location and spread of ln(tokens), and acceptance; null where there is none."""
    if expected is None:
        return ""
    length = expected.length
    known = [length.location, length.spread] if length else [None, None]
    return json.dumps([*known, expected.acceptance], separators=(",", ":"))


def _to_expected(text: bytes) -> Expected:
    location, spread, acceptance = json.loads(text)
    return Expected(None if location is None else Length(location, spread), acceptance)


def _optional(value: float | int | None) -> str:
    return "" if value is None else repr(value)
