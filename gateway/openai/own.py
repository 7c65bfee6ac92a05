"""What OpenAI's API has no place for: the state of a request (why am I waiting?), and its stream taken up again from
any token on, at the paths under /v1/requests; and what headers say in place of fields. Pure."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from google.protobuf.timestamp_pb2 import Timestamp

from gateway.openai.fields import UINT32, Own
from protos.errors import BadInput
from protos.times import seconds
from protos.v1 import types_pb2
from protos.v1.status_pb2 import RequestState, RequestStatus, WaitReason

SomeOwn = TypeVar("SomeOwn", bound=Own)
LAST_EVENT_ID = "last-event-id"
# The header by which gateways of others (smg) say how urgent a request is, and our classes by its values.
PRIORITY = "x-smg-priority"
IDEMPOTENCY = "idempotency-key"
_CLASSES = {"system": "interactive", "interactive": "interactive", "bulk": "batch"}
_ANSWER = re.compile(r"^(chatcmpl|cmpl|resp)[-_](?=.)")  # what the ids of answers have before the request's id


def with_headers(body: SomeOwn, headers: Mapping[str, str]) -> SomeOwn:
    """The body with what headers say in place of fields that it does not have."""
    said: dict[str, str] = {}
    if PRIORITY in headers and "class_" not in body.model_fields_set:
        said["class_"] = _CLASSES.get(headers[PRIORITY].strip().lower(), "default")  # as there, also of unknown values
    key = headers.get(IDEMPOTENCY, "").strip('"')  # the IETF's draft has quotes, most clients have none
    if key and body.request_id is None:
        said["request_id"] = key
        if "on_disconnect" not in body.model_fields_set:
            said["on_disconnect"] = "detach"  # who sends it again after a broken connection wants the answer
    return body.model_copy(update=said) if said else body


def of_answer(id: str) -> str:
    """The id of the request, from the id of an answer to it; other ids are returned as they are."""
    return _ANSWER.sub("", id, count=1)


def status(request: RequestStatus) -> dict[str, Any]:
    """Times are of the scheduler's clock, in ISO 8601; durations in seconds; null where it is not known."""
    state = RequestState.Name(request.state).removeprefix("REQUEST_STATE_").lower()
    reason = types_pb2.FinishReason.Name(request.finish_reason).removeprefix("FINISH_REASON_").lower()
    return {
        "id": request.request_id,
        "object": "request",
        "state": state,
        "why": _why(request),
        "finish_reason": reason if request.finish_reason else None,
        "position": request.position,
        "queue_level": request.queue_level,
        "perceptible": request.perceptible,
        "preemptions": request.preemptions,
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
        "max_tokens": request.max_tokens,
        "predicted_tokens": request.predicted_tokens,
        "rounds": request.rounds,
        "acceptance_rate": round(request.acceptance_rate, 4),
        "worker_id": request.worker_id or None,
        "queue_time_s": seconds(request.queue_time),
        "submit_time": _time(request, "submit_time"),
        "estimated_start_time": _time(request, "estimated_start_time"),
        "estimated_end_time": _time(request, "estimated_end_time"),
    }


def _why(request: RequestStatus) -> str:
    """The request's place, as a sentence."""
    before = f"{request.position} request{'s are' if request.position != 1 else ' is'} served before it"
    match request.state:
        case RequestState.REQUEST_STATE_WAITING:
            place = f" on worker {request.worker_id}" if request.worker_id else ", and no worker has room for it yet"
            if request.wait_reason == WaitReason.WAIT_REASON_NO_WORKER:
                place = ", and no worker is attached"
            so_far = "it has not run yet" if not request.output_tokens else "it waits to go on"
            return f"{so_far}: {before}{place}"
        case RequestState.REQUEST_STATE_PAUSED:
            return f"it was paused to let others run: {before}"
        case RequestState.REQUEST_STATE_RUNNING:
            return f"it runs on worker {request.worker_id}"
    return "it has ended"


def _time(request: RequestStatus, field: str) -> str | None:
    when: Timestamp = getattr(request, field)
    return when.ToJsonString() if request.HasField(field) else None  # type: ignore[arg-type]  # one of its fields


def offset(query: str | None, last_event_id: str | None) -> int:
    """The token where a resumed stream begins: behind the last event that the client has, else where the query says.
    Raises BadInput."""
    field, given = (LAST_EVENT_ID, last_event_id) if last_event_id else ("offset", query or "0")
    if not (given.isascii() and given.isdigit() and len(given) < 11 and int(given) <= UINT32):
        raise BadInput(field, "must be a number of output tokens")
    return int(given)
