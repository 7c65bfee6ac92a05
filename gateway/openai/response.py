"""One answer of the Responses API while it comes, as its objects and events: a message, a call, or both. Pure."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.chunk import Chunk
from gateway.openai.response_fields import Responses
from gateway.openai.tools import Calling, MayCall
from protos.errors import Cancelled
from protos.v1 import types_pb2
from protos.v1.inference_pb2 import Final

_STATUS = {types_pb2.FINISH_REASON_STOP: "completed", types_pb2.FINISH_REASON_LENGTH: "incomplete"}
# Of what has no effect. The service tier is not: an answer says which one it had.
TOLD_BACK = ("prompt_cache_key", "reasoning", "safety_identifier", "truncation", "user")
Event = tuple[str, dict[str, Any]]  # its type, and what it says


@dataclass(frozen=True, slots=True)
class Item:
    """One of the output: `head` is what is told of it from its beginning on."""

    kind: Literal["message", "function_call"]
    head: dict[str, Any]
    texts: list[str] = field(default_factory=list)

    @property
    def id(self) -> str:
        return str(self.head["id"])

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def told(self, status: str) -> dict[str, Any]:
        item = {"id": self.id, "type": self.kind, "status": status} | self.head
        if self.kind == "function_call":
            return item | {"arguments": self.text}
        return item | {"role": "assistant", "content": [_part(self.text)] if status != "in_progress" else []}


class Response:
    """`may`: what the answer may call."""

    def __init__(self, body: Responses, request_id: str, prompt_tokens: int, may: MayCall) -> None:
        self._body, self._id, self._prompt_tokens = body, request_id, prompt_tokens
        self._created = int(time.time())
        self._calling = Calling(may) if may.functions else None
        self._begun = False
        self._output: list[Item] = []  # the last one is still open
        self._final: Final | None = None
        self._events = 0

    def take(self, chunk: Chunk) -> None:
        """Of a plain answer. Raises Cancelled."""
        for _ in self._said(chunk):
            pass

    def events(self, chunk: Chunk) -> list[dict[str, Any]]:
        """The events that a stream says of it. Raises Cancelled."""
        return [self.event(kind, **said) for kind, said in self._said(chunk)]

    def event(self, kind: str, **said: Any) -> dict[str, Any]:
        self._events += 1
        return {"type": f"response.{kind}" if kind != "error" else kind, "sequence_number": self._events - 1, **said}

    def failed(self, error: dict[str, Any]) -> list[dict[str, Any]]:
        """The events that end a stream with an error. OpenAI's client takes none before those that open an answer."""
        return [*(self.event(kind, **said) for kind, said in self._opening()), self.event("error", **error)]

    def _opening(self) -> Iterator[Event]:
        if not self._begun:
            self._begun = True
            yield "created", {"response": self._object("in_progress", [])}
            yield "in_progress", {"response": self._object("in_progress", [])}

    def _said(self, chunk: Chunk) -> Iterator[Event]:
        words, arguments = (chunk.text, "") if self._calling is None else self._calling.push(chunk.text)
        if chunk.final is not None:
            if chunk.final.finish_reason not in _STATUS:
                raise Cancelled("the request was cancelled")
            self._final = chunk.final
            if self._calling is not None:
                held = self._calling.end(whole=self._status == "completed")
                words, arguments = words + held[0], arguments + held[1]
        yield from self._opening()
        if words:
            yield from self._grow("message", words)
        if self._calling is not None and self._calling.name:
            yield from self._grow("function_call", arguments)
        if self._final is not None:
            if not self._output:
                yield from self._grow("message", "")
            yield from self._closed(self._status)
            yield self._status, {"response": self.whole()}

    def _grow(self, kind: Literal["message", "function_call"], text: str) -> Iterator[Event]:
        """The last item of the output is one of this kind, and has this text more."""
        if not self._output or self._output[-1].kind != kind:
            yield from self._closed("completed")
            self._output.append(item := Item(kind, self._head(kind)))
            yield "output_item.added", self._place | {"item": item.told("in_progress")}
            if kind == "message":
                yield "content_part.added", self._at | {"part": _part("")}
        if text:
            self._output[-1].texts.append(text)
            event = "output_text.delta" if kind == "message" else "function_call_arguments.delta"
            yield event, self._at | {"delta": text} | ({"logprobs": []} if kind == "message" else {})

    def _closed(self, status: str) -> Iterator[Event]:
        """Its last item, if any, is whole, or cut."""
        if not self._output:
            return
        item = self._output[-1]
        if item.kind == "message":
            yield "output_text.done", self._at | {"text": item.text, "logprobs": []}
            yield "content_part.done", self._at | {"part": _part(item.text)}
        else:
            yield "function_call_arguments.done", self._at | {"name": item.head["name"], "arguments": item.text}
        yield "output_item.done", self._place | {"item": item.told(status)}

    def _head(self, kind: Literal["message", "function_call"]) -> dict[str, Any]:
        if kind == "message":
            return {"id": f"msg_{self._id}"}
        assert self._calling is not None
        name = self._calling.name
        return {"id": f"fc_{name}.{self._id}", "call_id": f"call_{self._id}", "name": name}  # kept.py reads the ids

    @property
    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self._output) - 1}

    @property
    def _at(self) -> dict[str, Any]:
        """Where the text of the last item grows."""
        item = self._output[-1]
        return self._place | {"item_id": item.id} | ({"content_index": 0} if item.kind == "message" else {})

    @property
    def _status(self) -> str:
        assert self._final is not None
        return _STATUS[self._final.finish_reason]

    def whole(self) -> dict[str, Any]:
        """Once it has ended."""
        assert self._final is not None
        output = self._final.usage.completion_tokens
        usage = {
            "input_tokens": self._prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._prompt_tokens + output,
        }
        why = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        *before, last = self._output
        items = [*(item.told("completed") for item in before), last.told(self._status)]
        return self._object(self._status, items) | {"incomplete_details": why, "usage": usage}

    def _object(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body
        said = body.model_dump(by_alias=True, exclude_none=True, include={"text", "tools", "tool_choice"})
        told_back = {name: value for name, value in (body.model_extra or {}).items() if name in TOLD_BACK}
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": body.model,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls,
            "background": False,
            "max_tool_calls": None,
            "metadata": body.metadata,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}} | said.get("text", {}),
            "tool_choice": said.get("tool_choice", "auto"),
            "tools": [{"parameters": None, "strict": None} | tool for tool in said["tools"]],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "top_logprobs": 0,
            "truncation": "disabled",
            "usage": None,
        } | told_back


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
