"""Log-probabilities in OpenAI's two shapes: that of chats, with exact bytes, and that of completions. Pure."""

import codecs
from collections.abc import Sequence
from typing import Any

from gateway.openai.token_bytes import TokenBytes
from protos.v1.types_pb2 import Logprob

LEAST = -9999.0  # JSON has no infinity; vLLM writes this, too


def for_chat(tokens: Sequence[int], logprobs: Sequence[Logprob], of: TokenBytes, first: bool) -> dict[str, Any]:
    """One entry a token. `first`: nothing was added to the text before these. The `bytes` of all entries, joined, are
    the text, but where a stop string cut it: its tokens are told, too."""
    content = []
    for token, logprob in zip(tokens, logprobs, strict=True):
        top = zip(logprob.top_tokens, logprob.top_logprobs, strict=True)
        entry = _entry(of.shown(token, first), logprob.logprob) | {"bytes": list(of.adds(token, first=first))}
        content.append(entry | {"top_logprobs": [_entry(of.shown(other, first), value) for other, value in top]})
        first = first and not of.adds(token)
    return {"content": content, "refusal": None}


def _entry(shown: tuple[str, list[int]], logprob: float) -> dict[str, Any]:
    text, data = shown
    return {"token": text, "logprob": _finite(logprob), "bytes": data}


class ForCompletion:
    """Of one choice. It counts the characters so far. `had`: of a resumed answer the text that the client has, complete
    once there are tokens."""

    def __init__(self, of: TokenBytes, had: Sequence[str] = ()) -> None:
        self._of, self._had = of, had
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def prompt(self, tokens: Sequence[int], logprobs: Sequence[Logprob]) -> dict[str, Any]:
        """Of a prompt that goes before the answer, as of the answer; its first token has none."""
        said, first = _nothing(), True
        for token, logprob in zip(tokens, [None, *logprobs], strict=True):
            self._say(said, token, logprob, first)
            first = first and not self._of.adds(token)
        return said

    def __call__(self, tokens: Sequence[int], logprobs: Sequence[Logprob], first: bool) -> dict[str, Any]:
        """Among the likeliest tokens of a position is the chosen one, too, wherever it stands. `first`: nothing was
        added to the text before these."""
        self._characters, self._had = self._characters + sum(map(len, self._had)), ()
        said = _nothing()
        for token, logprob in zip(tokens, logprobs, strict=True):
            self._say(said, token, logprob, first)
            first = first and not self._of.adds(token)
        return said

    def _say(self, said: dict[str, list[Any]], token: int, logprob: Logprob | None, first: bool) -> None:
        name = _name(self._of.named(token, first))
        value = None if logprob is None else _finite(logprob.logprob)
        top = [] if logprob is None else zip(logprob.top_tokens, logprob.top_logprobs, strict=True)
        likeliest: dict[str, float] = {}
        for other, its in top:  # without their space two may have one name, which is then the likelier one's
            likeliest.setdefault(_name(self._of.named(other, first)), _finite(its))
        said["tokens"].append(name)
        said["token_logprobs"].append(value)
        said["top_logprobs"].append(likeliest | {name: value} if likeliest else None)
        said["text_offset"].append(self._characters)
        self._characters += len(self._decoder.decode(self._of.adds(token, first=first)))


def for_prompt(tokens: Sequence[int], logprobs: Sequence[Logprob], of: TokenBytes) -> list[dict[str, Any] | None]:
    """Of a prompt by itself, in vLLM's shape: by token id the likeliest, and the token itself, whose rank is known only
    among them. Its first token has none."""
    said: list[dict[str, Any] | None] = [None]
    for token, logprob in zip(tokens[1:], logprobs, strict=True):
        top = zip(logprob.top_tokens, logprob.top_logprobs, strict=True)
        entries = {str(other): _ranked(other, value, rank, of) for rank, (other, value) in enumerate(top, 1)}
        said.append({str(token): _ranked(token, logprob.logprob, None, of)} | entries)
    return said


def _ranked(token: int, logprob: float, rank: int | None, of: TokenBytes) -> dict[str, Any]:
    return {"logprob": _finite(logprob), "rank": rank, "decoded_token": of.shown(token)[0]}


def _nothing() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST else LEAST  # so written that NaN is caught, too


def _name(data: bytes) -> str:
    """Names must differ where tokens do: one that is no text is written byte by byte, as OpenAI does."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
