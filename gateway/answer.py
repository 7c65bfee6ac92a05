"""The figures of one answer while it streams, and how it ends. No text and no RPC live here."""

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from gateway.feed import Batch
from protos.errors import BadInput, DeadlinePassed, Failed, RequestError
from protos.link.v1 import gateway_link_pb2
from protos.metrics import Distribution
from protos.times import duration
from protos.v1 import inference_pb2, types_pb2

_FINAL = (types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_CANCELLED)


@dataclass(slots=True)
class Answer:
    """`started` is on the monotonic clock, in seconds. `ttft` gets the time from there to the first token, and `itl`
    the times between later tokens."""

    ttft: Distribution
    itl: Distribution
    started: float = field(default_factory=time.monotonic)
    first_s: float | None = None  # when tokens came, on the same clock
    last_s: float = 0.0
    tokens: int = 0
    rounds: Counter[tuple[int, int]] = field(default_factory=Counter)  # by drafted and accepted tokens
    ending: gateway_link_pb2.Ending | None = None

    def add(self, batch: Batch) -> None:
        if batch.tokens:
            now = time.monotonic()
            if self.first_s is None:
                self.first_s = now
                self.ttft.observe(now - self.started)
            else:
                self.itl.observe(now - self.last_s)
            self.last_s = now
        self.tokens += len(batch.tokens)
        for _, drafted, accepted in batch.rounds:
            self.rounds[drafted, accepted] += 1
        self.ending = batch.ending

    @property
    def failure(self) -> RequestError | None:
        """The error that the client is told behind the tokens, if the request ended in a way that is no answer."""
        if self.ending is None or self.ending.finish_reason in _FINAL:
            return None
        if self.ending.finish_reason == types_pb2.FINISH_REASON_DEADLINE:
            return DeadlinePassed(f"the deadline passed after {self.tokens} output tokens")
        if self.ending.finish_reason == types_pb2.FINISH_REASON_ERROR:
            return _failed(self.ending.message or "the worker could not run the request")
        return Failed("the request ended in a way that is unknown here")

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token."""
        return None if self.first_s is None else self.first_s - self.started

    @property
    def finish_reason(self) -> str:
        if self.ending is None or self.ending.finish_reason not in types_pb2.FinishReason.values():
            return "broken_off"
        return types_pb2.FinishReason.Name(self.ending.finish_reason).removeprefix("FINISH_REASON_").lower()

    def final(self, prompt_tokens: int) -> inference_pb2.Final:
        assert self.ending is not None
        return inference_pb2.Final(
            finish_reason=self.ending.finish_reason,
            usage=inference_pb2.Usage(prompt_tokens=prompt_tokens, completion_tokens=self.tokens),
            spec_decode=self._spec_decode(),
            queue_time=duration(self.ending.queue_ms / 1000),
            preemptions=self.ending.preemptions,
            rounds=self.ending.rounds,
        )

    def _spec_decode(self) -> inference_pb2.SpecDecode:
        return inference_pb2.SpecDecode(
            num_drafts=sum(count for (drafted, _), count in self.rounds.items() if drafted),
            num_draft_tokens=sum(drafted * count for (drafted, _), count in self.rounds.items()),
            num_accepted_tokens=sum(accepted * count for (_, accepted), count in self.rounds.items()),
        )

    def summary(self) -> dict[str, Any]:
        return {
            "finish_reason": self.finish_reason,
            "output_tokens": self.tokens,
            "e2e_s": round(time.monotonic() - self.started, 4),
        }


def _failed(message: str) -> RequestError:
    """The worker's `message`. A structure that fails in mid-answer fails again wherever it is sent again, so it is told
    as those are that the gateway refuses. One that was late may be sent again: its message names no field."""
    field, _, problem = message.partition(": ")
    return BadInput(field, problem) if field == "structure" else Failed(message)
