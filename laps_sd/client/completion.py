"""A whole answer, folded from its chunks. No connection lives here."""

import time
from dataclasses import dataclass, field

from laps_sd.client.results import Chunk, Final, FinishReason, Logprob, Round, SpecDecode, Usage


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds: `queue` by the server's clock; `ttft` (first token) and `e2el` (whole answer) by the client's."""

    queue: float
    ttft: float
    e2el: float


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None  # stop, length or cancelled
    usage: Usage
    spec_decode: SpecDecode
    timings_ms: Timings
    preemptions: int
    logprobs: list[Logprob] | None  # one for each token, if the request asked for them
    prompt_token_ids: list[int] | None = None  # as in Chunk, like what follows
    prompt_logprobs: list[Logprob] | None = None
    embedding: list[float] | None = None


@dataclass(slots=True)
class Collector:
    """Folds the chunks of one answer, in order, into a Completion."""

    started: float = field(default_factory=time.monotonic)
    first: float | None = None
    request_id: str = ""
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    final: Final | None = None
    about_prompt: Chunk | None = None  # the one that tells of it

    def add(self, chunk: Chunk) -> None:
        if self.first is None and chunk.token_ids:
            self.first = time.monotonic()
        self.request_id = chunk.request_id
        self.text.append(chunk.text)
        self.token_ids.extend(chunk.token_ids)
        self.rounds.extend(chunk.rounds)
        self.logprobs.extend(chunk.logprobs)
        if chunk.final is not None:
            self.final = chunk.final
        if chunk.prompt_token_ids or chunk.embedding:
            self.about_prompt = chunk

    def completion(self) -> Completion:
        """Raises ValueError before the last chunk."""
        if self.final is None:
            raise ValueError("the answer has no last chunk yet")
        now, final, told = time.monotonic(), self.final, self.about_prompt
        scored = told is not None and bool(told.prompt_token_ids)
        return Completion(
            request_id=self.request_id,
            text="".join(self.text),
            token_ids=self.token_ids,
            finish_reason=final.finish_reason,
            usage=final.usage,
            spec_decode=SpecDecode(
                num_drafts=final.spec_decode.num_drafts,
                num_draft_tokens=final.spec_decode.num_draft_tokens,
                num_accepted_tokens=final.spec_decode.num_accepted_tokens,
                accepted_per_round=[r.accepted for i, r in enumerate(self.rounds) if r.drafted > 0 or i > 0],
            ),
            timings_ms=Timings(
                queue=final.queue_time.total_seconds() * 1e3,
                ttft=((self.first or now) - self.started) * 1e3,
                e2el=(now - self.started) * 1e3,
            ),
            preemptions=final.preemptions,
            logprobs=self.logprobs or None,
            prompt_token_ids=told.prompt_token_ids if told and scored else None,
            prompt_logprobs=told.prompt_logprobs if told and scored else None,
            embedding=(told.embedding or None) if told else None,
        )
