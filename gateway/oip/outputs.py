"""The values of the output tensors of an answer, chunk by chunk. Nothing is sent from here."""

import json
from typing import Any

from gateway.chunk import Chunk
from gateway.oip.request import Asked
from gateway.text import TextModel
from protos.errors import Cancelled
from protos.v1 import types_pb2

_REASONS = {types_pb2.FINISH_REASON_STOP: b"stop", types_pb2.FINISH_REASON_LENGTH: b"length"}


class Outputs:
    """Collects chunks; `take` gives what was added since the last time."""

    def __init__(self, asked: Asked, model: TextModel, prompt_tokens: int) -> None:
        self.final = False
        self._asked, self._model, self._prompt_tokens = asked, model, prompt_tokens
        self._text = [asked.prompt_in_front]
        self._logprobs: list[dict[str, Any]] = []
        self._tokens, self._reason = 0, b""

    def add(self, chunk: Chunk) -> None:
        """Raises Cancelled if the answer ends that way: it is neither whole nor at its length."""
        self._text.append(chunk.text)
        self._tokens += len(chunk.token_ids)
        if "logprobs" in self._asked.outputs:
            self._logprobs += map(self._logprob, chunk.token_ids, chunk.logprobs)
        if chunk.final is not None:
            self.final = True
            if chunk.final.finish_reason not in _REASONS:
                raise Cancelled("the request was cancelled")
            self._reason = _REASONS[chunk.final.finish_reason]

    def take(self) -> dict[str, bytes | int]:
        """The values by the tensor's name: those that were asked for."""
        values: dict[str, bytes | int] = {
            "text_output": "".join(self._text).encode(),
            "finish_reason": self._reason,
            "logprobs": json.dumps(self._logprobs).encode(),
            "num_input_tokens": self._prompt_tokens,
            "num_output_tokens": self._tokens,
        }
        self._text, self._logprobs, self._tokens = [], [], 0
        return {name: value for name, value in values.items() if name in self._asked.outputs}

    def _logprob(self, token: int, logprob: types_pb2.Logprob) -> dict[str, Any]:
        """By token id, the chosen one first, as vLLM's backend for Triton has it. `rank` is 1 for the likeliest, and
        null where it is not known."""
        top = list(zip(logprob.top_tokens, logprob.top_logprobs, strict=True))
        ranks = {own: rank for rank, (own, _) in enumerate(top, 1)}
        return {
            str(own): {"logprob": value, "rank": ranks.get(own), "decoded_token": self._model.shown(own)}
            for own, value in {token: logprob.logprob, **dict(top)}.items()
        }
