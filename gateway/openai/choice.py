"""One choice of an answer while it comes: its text, its log-probabilities, its call of a function, and what it counts.
Pure: it gets chunks, and words what is said of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gateway.answer import Answer
from gateway.chunk import Chunk
from gateway.openai import logprobs
from gateway.openai.token_bytes import TokenBytes
from gateway.openai.tools import NOTHING, Calling, MayCall
from protos.errors import Cancelled
from protos.v1 import types_pb2
from protos.v1.inference_pb2 import Final

_REASONS = {types_pb2.FINISH_REASON_STOP: "stop", types_pb2.FINISH_REASON_LENGTH: "length"}
MOST_ACCEPTED = 256  # the histogram has no more places; nobody drafts so many


@dataclass(slots=True)
class Speculation:
    """`steps` drafted `drafted` tokens in all, of which `accepted` were; `histogram`: steps by how many of their tokens
    were."""

    histogram: list[int]
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    longest_draft: int = 0

    def add(self, drafted: int, accepted: int, count: int) -> None:
        """So many steps that drafted and accepted that."""
        self.histogram += [0] * (accepted + 1 - len(self.histogram))
        self.histogram[accepted] += count
        self.steps += count
        self.drafted += drafted * count
        self.accepted += accepted * count
        self.longest_draft = max(self.longest_draft, drafted)


class Choice:
    """`index`: its place in the answer. `figures`: of its stream, which counts before a chunk comes here. `echo`: what
    goes before its text. `may`: what it may call. `prompt_apart`: the prompt's log-probabilities are told by
    themselves, in `of_prompt`, not before the answer's. `marked`: it is resumed, and may have a marked call. `had`: the
    text before it that the client has, complete once there is a chunk."""

    def __init__(
        self,
        index: int,
        request_id: str,
        *,
        figures: Answer,
        chat: bool,
        of: TokenBytes,
        echo: str = "",
        may: MayCall = NOTHING,
        prompt_apart: bool = False,
        marked: bool = False,
        had: Sequence[str] = (),
    ) -> None:
        self.index = index
        self.of_prompt: list[dict[str, Any] | None] | None = None
        self._apart = prompt_apart
        self._before: dict[str, Any] | None = None  # log-probabilities that go before the answer's
        self.final: Final | None = None
        self.figures = figures
        self._request_id, self._chat, self._of = request_id, chat, of
        self._text = [echo] if echo else []
        self._unsaid = echo  # goes with the first event
        self._begun = False  # the first event is said
        self._calling = Calling(may) if may.functions or marked else None
        self._had = had
        self._worded = False  # words that go with a call, or in place of one, are said
        self._called = False  # the name of the function is said
        self._role = {"role": "assistant"}  # goes with the first event
        self._logprobs: dict[str, Any] | None = None
        self._silent = False  # all tokens so far were special ones, or none
        self._for_completion = logprobs.ForCompletion(of, had)

    def tell_prompt(self, chunk: Chunk) -> None:
        """To be called before a chunk that tells of the prompt is taken. It may take long: a thread may do it."""
        if self._apart:
            self.of_prompt = logprobs.for_prompt(chunk.prompt_token_ids, chunk.prompt_logprobs, self._of)
        else:
            self._before = self._for_completion.prompt(chunk.prompt_token_ids, chunk.prompt_logprobs)

    def take(self, chunk: Chunk) -> None:
        """Of a plain answer. Raises Cancelled."""
        self._end(chunk)
        self._text.append(chunk.text)
        self._keep(self._said_logprobs(chunk))

    def events(self, chunk: Chunk) -> list[dict[str, Any]]:
        """The entries of `choices` that a stream says of it. Raises Cancelled."""
        self._end(chunk)
        if self._had and self._calling is not None:
            self._calling.push("".join(self._had))
            self._had, self._called = (), bool(self._calling.name)
        said = []
        if chunk.token_ids or chunk.text or self._unsaid or chunk.prompt_token_ids:
            text, self._unsaid = self._unsaid + chunk.text, ""
            said.append(self._entry(text, self._said_logprobs(chunk), None))
            if chunk.prompt_token_ids and self._apart:
                said[-1]["prompt_logprobs"] = self.of_prompt
            self._begun = True
        if self.final is not None:
            if self._calling is not None and (delta := self._last(self._calling)):
                said.append({"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None})
            said.append(self._entry("", None, self._reason()))
        return said

    def adds_text(self, chunk: Chunk) -> bool:
        """Whether a stream says nothing of it but its text, as `text_entry` has it."""
        return self._begun and self._calling is None and not chunk.logprobs and chunk.final is None

    def text_entry(self) -> dict[str, Any]:
        """An entry of a stream that adds an empty text. The first entry of all tells the role, too."""
        return self._entry("", None, None)

    def whole(self) -> dict[str, Any]:
        """Once it has ended."""
        text, reason = "".join(self._text), self._reason()
        if not self._chat:
            apart = {"prompt_logprobs": self.of_prompt} if self._apart else {}
            return {"index": self.index, "text": text, "logprobs": self._logprobs, "finish_reason": reason} | apart
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._calling is not None:
            said, held = self._calling.push(text), self._calling.end(whole=self._ended)
            words, arguments = (begin + end for begin, end in zip(said, held, strict=True))
            message["content"] = words or (None if self._calling.name else "")
            if self._calling.name:
                message["tool_calls"] = [self._head() | {"function": self._function(arguments)}]
            reason = self._reason()
        return {"index": self.index, "message": message, "logprobs": self._logprobs, "finish_reason": reason}

    def _entry(self, text: str, said: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        if not self._chat:
            return {"index": self.index, "text": text, "logprobs": said, "finish_reason": reason}
        delta: dict[str, Any] = {}
        if reason is None:
            delta, self._role = self._role, {}
            delta = {
                **delta,
                **({"content": text} if self._calling is None else self._delta(*self._calling.push(text))),
            }
            if "role" in delta:
                delta.setdefault("content", None)
        return {"index": self.index, "delta": delta, "logprobs": said, "finish_reason": reason}

    def _last(self, calling: Calling) -> dict[str, Any]:
        """What was held back. An answer without a call has a content, though it be empty: it could not be sent as a
        message of a conversation else."""
        delta = self._delta(*calling.end(whole=self._ended))
        return delta if self._worded or self._called else {"content": ""} | delta

    def _delta(self, words: str, arguments: str) -> dict[str, Any]:
        """The first one of a call has the function's name, the others what its arguments grow by."""
        assert self._calling is not None
        delta: dict[str, Any] = {"content": words} if words else {}
        self._worded = self._worded or bool(words)
        if self._calling.name and not self._called:
            self._called = True
            return delta | {"tool_calls": [{"index": 0} | self._head() | {"function": self._function(arguments)}]}
        return delta | ({"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]} if arguments else {})

    def _head(self) -> dict[str, Any]:
        return {"id": f"call_{self._request_id}", "type": "function"}

    def _function(self, arguments: str) -> dict[str, Any]:
        assert self._calling is not None
        return {"name": self._calling.name, "arguments": arguments}

    @property
    def _ended(self) -> bool:
        """By itself, not cut."""
        return self.final is not None and _REASONS[self.final.finish_reason] == "stop"

    def _reason(self) -> str:
        assert self.final is not None
        called = self._calling is not None and self._calling.whole
        return "tool_calls" if called else _REASONS[self.final.finish_reason]

    def _said_logprobs(self, chunk: Chunk) -> dict[str, Any] | None:
        before, self._before = self._before, None
        if not chunk.logprobs:
            return before
        first = self._silent or chunk.offset == 0
        self._silent = first and not any(map(self._of.adds, chunk.token_ids))
        if self._chat:
            return logprobs.for_chat(chunk.token_ids, chunk.logprobs, self._of, first)
        said = self._for_completion(chunk.token_ids, chunk.logprobs, first)
        return {name: values + said[name] for name, values in before.items()} if before else said

    def _keep(self, said: dict[str, Any] | None) -> None:
        if said is None or self._logprobs is None:
            self._logprobs = said or self._logprobs
            return
        for name, values in said.items():
            if values is not None:
                self._logprobs[name].extend(values)

    def _end(self, chunk: Chunk) -> None:
        if chunk.final is not None:
            if chunk.final.finish_reason not in _REASONS:
                raise Cancelled("the request was cancelled")
            self.final = chunk.final

    def speculation(self) -> Speculation:
        """The outcome of its drafts."""
        made = Speculation(histogram=[])
        for (drafted, accepted), count in self.figures.rounds.items():
            if drafted:
                made.add(drafted, min(accepted, MOST_ACCEPTED), count)
        return made
