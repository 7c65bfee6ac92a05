"""The parts of a stream, as plain data: chunks, and the rounds in them. Nothing is done with them here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from protos.v1 import inference_pb2, types_pb2


class Round(NamedTuple):
    """The outcome of one round: output tokens, and how many were drafted and accepted for it."""

    tokens: int
    drafted: int
    accepted: int


@dataclass(slots=True)
class Chunk:
    """A piece of an answer: gRPC's GenerateResponse as plain data. The last one has `final`."""

    request_id: str = ""
    text: str = ""
    token_ids: Sequence[int] = ()
    offset: int = 0  # output tokens before it
    rounds: Sequence[Round] = ()
    logprobs: Sequence[types_pb2.Logprob] = ()  # one for each token, or none at all
    prompt_token_ids: Sequence[int] = ()  # this and what follows as in GenerateResponse
    prompt_logprobs: Sequence[types_pb2.Logprob] = ()
    embedding: Sequence[float] = ()
    final: inference_pb2.Final | None = None

    def message(self) -> inference_pb2.GenerateResponse:
        return inference_pb2.GenerateResponse(
            request_id=self.request_id,
            text=self.text,
            token_ids=self.token_ids,
            offset=self.offset,
            rounds=[types_pb2.Round(**each._asdict()) for each in self.rounds],
            logprobs=self.logprobs,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            embedding=self.embedding,
            final=self.final,
        )
