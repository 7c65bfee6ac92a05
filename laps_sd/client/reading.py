"""From the messages of protos/v1 to the typed values of results.py, by the names of their fields."""

from dataclasses import fields
from datetime import UTC
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from laps_sd.client.results import (
    Chunk,
    Final,
    Logprob,
    PolicyComparison,
    PolicyFigures,
    Predictor,
    PriorityLoad,
    RequestPage,
    RequestStatus,
    Round,
    SpecDecode,
    Stats,
    TenantLoad,
    Usage,
    Worker,
)
from laps_sd.client.wire import inference_pb2, types_pb2

KINDS: dict[str, type[Any]] = {
    "RequestStatus": RequestStatus,
    "ListRequestsResponse": RequestPage,
    "WorkerStatus": Worker,
    "PredictorStatus": Predictor,
    "PriorityStatus": PriorityLoad,
    "TenantStatus": TenantLoad,
    "StatsResponse": Stats,
    "PolicyFigures": PolicyFigures,
    "ComparePoliciesResponse": PolicyComparison,
    "Round": Round,
    "Usage": Usage,
    "SpecDecode": SpecDecode,
    "Final": Final,
}
Result = TypeVar("Result")


def read(kind: type[Result], message: Message) -> Result:
    """The message as a `kind`, whose fields have the message's names. What the message does not have set keeps its
    default, and so does what an older server does not know."""
    values: dict[str, Any] = {}
    known = message.DESCRIPTOR.fields_by_name
    for each in fields(kind):  # type: ignore[arg-type]  # every kind is a dataclass
        if (described := known.get(each.name)) is None:
            continue
        value = getattr(message, each.name)
        if described.is_repeated:
            values[each.name] = [_value(described, item) for item in value]
        elif not described.has_presence or message.HasField(each.name):
            values[each.name] = _value(described, value)
    return kind(**values)


def _value(described: Any, value: Any) -> Any:
    if isinstance(value, Duration):
        return value.ToTimedelta()
    if isinstance(value, Timestamp):
        return value.ToDatetime(tzinfo=UTC)
    if described.message_type is not None:
        return read(KINDS[described.message_type.name], value)
    return _word(described.enum_type, value) if described.enum_type is not None else value


def _word(enum: Any, number: int) -> str | None:
    """Such as `running`; None: unspecified."""
    if number == 0:
        return None
    if (value := enum.values_by_number.get(number)) is None:
        return str(number)  # of a newer server
    word: str = value.name.removeprefix(enum.values[0].name.removesuffix("UNSPECIFIED"))
    return word.lower()


def chunk(message: inference_pb2.GenerateResponse) -> Chunk:
    """By hand, unlike the other results: a stream has thousands of them."""
    return Chunk(
        request_id=message.request_id,
        text=message.text,
        token_ids=list(message.token_ids),
        offset=message.offset,
        rounds=[Round(each.tokens, each.drafted, each.accepted) for each in message.rounds],
        logprobs=[_logprob(each) for each in message.logprobs],
        final=read(Final, message.final) if message.HasField("final") else None,
        prompt_token_ids=list(message.prompt_token_ids),
        prompt_logprobs=[_logprob(each) for each in message.prompt_logprobs],
        embedding=list(message.embedding),
    )


def _logprob(own: types_pb2.Logprob) -> Logprob:
    return Logprob(own.logprob, list(zip(own.top_tokens, own.top_logprobs, strict=True)))
