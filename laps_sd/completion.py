"""What comes of a request, as the client hands it out: a whole answer folded from its chunks, and words for enums. No
connection lives here."""

import time
from dataclasses import dataclass, field

from protos.times import milliseconds
from protos.v1 import inference_pb2, status_pb2, types_pb2


@dataclass(frozen=True, slots=True)
class SpecDecode:
    """What speculative decoding did for one answer. `accepted_per_round` leaves out the first round, which is prefill,
    if it drafted nothing."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_round: list[int]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probabilities at one output position, in the model's own distribution: before penalties, bias, temperature,
    top-k and top-p."""

    logprob: float
    top: list[tuple[int, float]]  # token ids and log-probabilities of the likeliest tokens, best first


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. `timings_ms`: `queue` by the server's clock; `ttft` (first token) and `e2el` (whole
    answer) by the client's."""

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: str  # stop, length or cancelled
    usage: dict[str, int]
    spec_decode: SpecDecode
    timings_ms: dict[str, float]
    preemptions: int
    logprobs: list[Logprob] | None  # one for each token, if the request asked for them


@dataclass(slots=True)
class Collector:
    """Folds the chunks of one answer, in order, into a Completion."""

    started: float = field(default_factory=time.monotonic)
    first: float | None = None
    request_id: str = ""
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    rounds: list[types_pb2.Round] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    final: inference_pb2.Final | None = None

    def add(self, chunk: inference_pb2.GenerateResponse) -> None:
        if self.first is None and chunk.token_ids:
            self.first = time.monotonic()
        self.request_id = chunk.request_id
        self.text.append(chunk.text)
        self.token_ids.extend(chunk.token_ids)
        self.rounds.extend(chunk.rounds)
        for own in chunk.logprobs:
            self.logprobs.append(Logprob(own.logprob, list(zip(own.top_tokens, own.top_logprobs, strict=True))))
        if chunk.HasField("final"):
            self.final = chunk.final

    def completion(self) -> Completion:
        """Raises ValueError before the last chunk."""
        if self.final is None:
            raise ValueError("the answer has no last chunk yet")
        now, final = time.monotonic(), self.final
        return Completion(
            request_id=self.request_id,
            text="".join(self.text),
            token_ids=self.token_ids,
            finish_reason=finish_reason(final),
            usage={
                "prompt_tokens": final.usage.prompt_tokens,
                "completion_tokens": final.usage.completion_tokens,
            },
            spec_decode=SpecDecode(
                num_drafts=final.spec_decode.num_drafts,
                num_draft_tokens=final.spec_decode.num_draft_tokens,
                num_accepted_tokens=final.spec_decode.num_accepted_tokens,
                accepted_per_round=[r.accepted for i, r in enumerate(self.rounds) if r.drafted > 0 or i > 0],
            ),
            timings_ms={
                "queue": milliseconds(final.queue_time),
                "ttft": ((self.first or now) - self.started) * 1e3,
                "e2el": (now - self.started) * 1e3,
            },
            preemptions=final.preemptions,
            logprobs=self.logprobs or None,
        )


def finish_reason(final: inference_pb2.Final) -> str:
    """stop, length or cancelled."""
    return types_pb2.FinishReason.Name(final.finish_reason).removeprefix("FINISH_REASON_").lower()


def request_state(status: status_pb2.RequestStatus) -> str:
    """waiting, running, paused or finished."""
    return status_pb2.RequestState.Name(status.state).removeprefix("REQUEST_STATE_").lower()
