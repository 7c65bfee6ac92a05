"""What a server answers, as typed values: dataclasses that mirror the messages of protos/v1, field by field. Times are
datetimes in UTC, lengths of time are timedeltas, enums are words. No connection lives here."""

from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from laps_sd.client.wire import inference_pb2

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]
RequestState = Literal["waiting", "running", "paused", "finished"]
PredictorState = Literal["none", "cold", "warm"]

ZERO = timedelta(0)


@dataclass(frozen=True, slots=True)
class Round:
    """One draft-verify iteration: its output tokens, and how many tokens were drafted and accepted."""

    tokens: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probabilities at one output position, in the model's own distribution: before penalties, bias, temperature,
    top-k and top-p."""

    logprob: float
    top: list[tuple[int, float]]  # token ids and log-probabilities of the likeliest tokens, best first


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of prompt and output."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SpecDecode:
    """What speculative decoding did for one answer. `accepted_per_round` is of whole answers alone, and leaves out the
    first round, which is prefill, if it drafted nothing."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_round: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Final:
    """The end of an answer: stop, length or cancelled. Every other end is an error."""

    finish_reason: FinishReason | None = None
    usage: Usage = field(default_factory=Usage)
    spec_decode: SpecDecode = field(default_factory=SpecDecode)
    preemptions: int = 0
    rounds: int = 0
    queue_time: timedelta = ZERO  # from submission to the first round


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an answer: the tokens of one or more rounds. `final` is on the last one alone."""

    request_id: str
    text: str  # what these tokens add; empty while a character is incomplete
    token_ids: list[int]
    offset: int  # output tokens before this chunk
    rounds: list[Round]
    logprobs: list[Logprob]  # one for each token, if the request asked for them
    final: Final | None


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """Where one request stands. `position`: requests that are served before it."""

    request_id: str = ""
    state: RequestState | None = None
    finish_reason: FinishReason | None = None  # None: it is live
    queue_level: int = 0  # 1 is the highest
    perceptible: bool = False
    position: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    rounds: int = 0
    acceptance_rate: float = 0.0
    worker_id: str = ""
    tenant: str = ""
    max_tokens: int = 0
    predicted_tokens: int = 0
    submit_time: datetime | None = None
    estimated_start_time: datetime | None = None
    estimated_end_time: datetime | None = None
    queue_time: timedelta = ZERO


@dataclass(frozen=True, slots=True)
class RequestPage:
    """Some live requests, those that run first. `next_page_token` asks for the next page; empty: this is the last."""

    requests: list[RequestStatus] = field(default_factory=list)
    next_page_token: str = ""
    read_time: datetime | None = None


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker that is attached; counters count since then."""

    worker_id: str = ""
    slots: int = 0
    running: int = 0
    placed: int = 0
    free_blocks: int = 0
    blocks: int = 0
    rounds: int = 0
    idle_share: float = 0.0
    outside_forward_share: float = 0.0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Predictor:
    """How much the predictor of output lengths has learned."""

    version: int = 0
    finished: int = 0
    trained_on: int = 0
    state: PredictorState | None = None


@dataclass(frozen=True, slots=True)
class PriorityLoad:
    """What one priority has waiting or running."""

    priority: Literal["interactive", "default", "batch"] | None = None
    requests: int = 0
    tokens: int = 0
    backlog: timedelta = ZERO


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """What one tenant has waiting or running, or had refused."""

    tenant: str = ""
    waiting: int = 0
    running: int = 0
    tokens: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """Figures of the whole service; counters count since its scheduler began."""

    policy: str = ""
    model: str = ""
    waiting: int = 0
    running: int = 0
    paused: int = 0
    queue_lengths: list[int] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    submitted: int = 0
    finished: int = 0
    cancelled: int = 0
    preemptions: int = 0
    output_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    epoch: int = 0
    predictor: Predictor = field(default_factory=Predictor)
    context_tokens: int = 0
    priorities: list[PriorityLoad] = field(default_factory=list)
    tenants: list[TenantLoad] = field(default_factory=list)
    refused: int = 0
    expired: int = 0
    report_to_command_p50: timedelta = ZERO
    report_to_command_p99: timedelta = ZERO
    read_time: datetime | None = None
    backlog_bound: timedelta | None = None  # None: no bound
    unreadable: int = 0


KINDS: dict[str, type[Any]] = {
    "RequestStatus": RequestStatus,
    "ListRequestsResponse": RequestPage,
    "WorkerStatus": Worker,
    "PredictorStatus": Predictor,
    "PriorityStatus": PriorityLoad,
    "TenantStatus": TenantLoad,
    "StatsResponse": Stats,
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
        logprobs=[
            Logprob(own.logprob, list(zip(own.top_tokens, own.top_logprobs, strict=True))) for own in message.logprobs
        ],
        final=read(Final, message.final) if message.HasField("final") else None,
    )
