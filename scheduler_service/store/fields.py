"""A record as the fields of a Redis hash, and back. Readable with redis-cli; nothing else reads or writes them."""

import json
from collections.abc import Mapping

from scheduler_service.core.beliefs import Acceptance, Expected, Length
from scheduler_service.core.lifecycle import State
from scheduler_service.core.types import Record, Request, RequestClass


def of_request(request: Request) -> dict[str, str]:
    """What never changes."""
    return {
        "arrival": of_arrival(request),
        "prompt_tokens": str(request.prompt_tokens),
        "max_tokens": str(request.max_tokens),
        "class": str(int(request.klass)),
        "deadline": _optional(request.deadline),
        "predicted_tokens": _optional(request.predicted_tokens),
        "expected": _of_expected(request.expected),
        "tenant": request.tenant,
    }


def of_arrival(request: Request) -> str:
    """With its id it tells a request from any other."""
    return repr(request.arrival)


def of_record(record: Record) -> dict[str, str]:
    """What changes. `emitted` and `level` are written by the script: it checks them."""
    return {
        "state": record.state.value,
        "placement": str(record.placement),
        "rounds": str(record.acceptance.rounds),
        "prefilled": str(record.prefilled),
        "drafted": str(record.acceptance.drafted),
        "accepted": str(record.acceptance.accepted),
        "rejected": str(record.acceptance.rejected),
        "means": json.dumps([round(mean, 6) for mean in record.acceptance.means], separators=(",", ":")),
        "perceptible": str(int(record.perceptible)),
        "key": repr(record.key),
        "preemptions": str(record.preemptions),
        "started": _optional(record.started),
        "deaths": str(record.deaths),
        "probation": str(record.probation),
    }


def to_record(id: str, fields: Mapping[str, str]) -> Record:
    """Raises KeyError or ValueError if a field is missing or malformed."""
    request = Request(
        id=id,
        arrival=float(fields["arrival"]),
        prompt_tokens=int(fields["prompt_tokens"]),
        max_tokens=int(fields["max_tokens"]),
        klass=RequestClass(int(fields["class"])),
        deadline=float(fields["deadline"]) if fields["deadline"] else None,
        predicted_tokens=int(fields["predicted_tokens"]) if fields["predicted_tokens"] else None,
        expected=_to_expected(text) if (text := fields.get("expected")) else None,
        tenant=fields.get("tenant", ""),
    )
    acceptance = Acceptance(
        rounds=int(fields["rounds"]),
        drafted=int(fields["drafted"]),
        accepted=int(fields["accepted"]),
        rejected=int(fields["rejected"]),
        means=tuple(json.loads(fields["means"])),
    )
    return Record(
        request=request,
        state=State(fields["state"]),
        placement=int(fields["placement"]),
        emitted=int(fields["emitted"]),
        prefilled=int(fields["prefilled"]),
        acceptance=acceptance,
        perceptible=fields["perceptible"] == "1",
        level=int(fields["level"]),
        key=float(fields["key"]),
        preemptions=int(fields["preemptions"]),
        started=float(fields["started"]) if fields["started"] else None,
        deaths=int(fields.get("deaths", 0)),
        probation=int(fields.get("probation", 0)),
    )


def _of_expected(expected: Expected | None) -> str:
    """Location and spread of ln(tokens), and acceptance; null where there is none."""
    if expected is None:
        return ""
    length = expected.length
    known = [length.location, length.spread] if length else [None, None]
    return json.dumps([*known, expected.acceptance], separators=(",", ":"))


def _to_expected(text: str) -> Expected:
    location, spread, acceptance = json.loads(text)
    return Expected(None if location is None else Length(location, spread), acceptance)


def _optional(value: float | int | None) -> str:
    return "" if value is None else repr(value)
