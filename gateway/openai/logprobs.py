"""Log-probabilities in OpenAI's two shapes: that of chats, with exact bytes, and that of completions. Pure."""

import codecs
from collections.abc import Sequence
from typing import Any

from gateway.openai.token_bytes import TokenBytes
from protos.v1.types_pb2 import Logprob

LEAST = -9999.0  # JSON has no infinity; vLLM writes this, too


def for_chat(tokens: Sequence[int], logprobs: Sequence[Logprob], of: TokenBytes, start: int) -> dict[str, Any]:
    """One entry a token. `start`: output tokens before these. The `bytes` of all entries, joined, are the text, but
    where a stop string cut it: its tokens are told, too."""
    content = []
    for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        adds = of.adds(token, first=start + i == 0)
        text = adds.decode(errors="replace") if adds else of.shown(token)[0]
        top = zip(logprob.top_tokens, logprob.top_logprobs, strict=True)
        entry = {"token": text, "logprob": _finite(logprob.logprob), "bytes": list(adds)}
        content.append(entry | {"top_logprobs": [_entry(of.shown(other), value) for other, value in top]})
    return {"content": content, "refusal": None}


def _entry(shown: tuple[str, list[int]], logprob: float) -> dict[str, Any]:
    text, data = shown
    return {"token": text, "logprob": _finite(logprob), "bytes": data}


class ForCompletion:
    """Of one choice. It counts the characters so far."""

    def __init__(self, of: TokenBytes) -> None:
        self._of = of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = self._tokens = 0

    def __call__(self, tokens: Sequence[int], logprobs: Sequence[Logprob]) -> dict[str, Any]:
        """Among the likeliest tokens of a position is the chosen one, too, wherever it stands."""
        said: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, logprob in zip(tokens, logprobs, strict=True):
            adds = self._of.adds(token, first=self._tokens == 0)
            name, value = _name(adds or self._of.of(token)), _finite(logprob.logprob)
            said["tokens"].append(name)
            said["token_logprobs"].append(value)
            top = zip(logprob.top_tokens, logprob.top_logprobs, strict=True)
            likeliest = {_name(self._of.of(other)): _finite(its) for other, its in top}
            said["top_logprobs"].append(likeliest | {name: value} if likeliest else None)
            said["text_offset"].append(self._characters)
            self._characters += len(self._decoder.decode(adds))
            self._tokens += 1
        return said


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST else LEAST  # so written that NaN is caught, too


def _name(data: bytes) -> str:
    """Names must differ where tokens do: one that is no text is written byte by byte, as OpenAI does."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
