"""What a server answers, as typed values: a table of dataclasses that mirror the messages of protos/v1, field by field.
Times are datetimes in UTC, lengths of time are timedeltas, enums are words."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]
RequestState = Literal["waiting", "running", "paused", "finished"]
PredictorState = Literal["none", "cold", "warm"]
Priority = Literal["interactive", "default", "batch"]
WaitReason = Literal[
    "no_worker", "turn", "arrival", "begun", "priority", "tenant", "overdue", "level", "perceptible", "claim", "suspect"
]

ZERO = timedelta(0)


@dataclass(frozen=True, slots=True)
class Round:
    """One draft-verify iteration: its output tokens, and how many tokens were drafted and accepted."""

    tokens: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probabilities at one position, in the model's own distribution: before penalties, bias, temperature,
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
    # Of the prompt, in one chunk alone, if the request asked for it: the tokens; of each but the first the
    # log-probability; the embedding.
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    embedding: list[float] = field(default_factory=list)


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
    priority: Priority | None = None
    wait_reason: WaitReason | None = None  # None: it runs, or has ended; each reason: WaitReason in status.proto
    passed_by: list[str] = field(default_factory=list)  # requests that run now although they came later
    recent_rounds: list[Round] = field(default_factory=list)


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
    draining: bool = False  # it is about to end


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

    priority: Priority | None = None
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
    loading_workers: list[str] = field(default_factory=list)  # names of those that are coming


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """How one policy would have served the last requests, by the simulator."""

    policy: str = ""
    mean_latency: timedelta = ZERO
    p99_latency: timedelta = ZERO
    mean_time_to_first_token: timedelta = ZERO
    preemptions: float = 0.0


@dataclass(frozen=True, slots=True)
class PolicyComparison:
    """The same requests under several policies, and as they were served."""

    policies: list[PolicyFigures] = field(default_factory=list)
    running_policy: str = ""
    measured_mean_latency: timedelta = ZERO
    requests: int = 0
    window: timedelta = ZERO
    compare_time: datetime | None = None  # None: there is none yet
    computing: bool = False
    ended_requests: int = 0
    least_requests: int = 0
    problem: str = ""
