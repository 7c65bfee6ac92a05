"""OpenAI's Responses API as far as it needs no state on the server: a body to the chat that answers it, and the answer
as its objects and events. Pure."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gateway.chunk import Chunk
from gateway.http.errors import Unsupported
from gateway.openai import request
from gateway.openai.fields import Chat, InputItem, Responses, TextFormat
from protos.errors import BadInput, Cancelled
from protos.v1 import types_pb2
from protos.v1.inference_pb2 import Final

_STATUS = {types_pb2.FINISH_REASON_STOP: "completed", types_pb2.FINISH_REASON_LENGTH: "incomplete"}
_TEXTS = ("input_text", "output_text")


def asked(body: Responses, request_id: str) -> request.Asked:
    """`request_id`: the id, unless the body has one. Raises BadInput."""
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += [_message(i, item) for i, item in enumerate(body.input)]
    format = body.text.format if body.text else None
    chat = {
        "model": body.model,
        "messages": messages,
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": body.stream,
        "response_format": _format(format) if format else None,
        "request_id": body.request_id,
        "class": body.class_,
        "predicted_tokens": body.predicted_tokens,
        "timeout_s": body.timeout_s,
        "on_disconnect": body.on_disconnect,
    }
    made = request.of_chat(Chat.model_validate(chat), request_id)
    names = {**made.names, "chat": "input", "max_tokens": "max_output_tokens", "structure": "text"}
    return replace(made, names=names)


def _message(number: int, item: InputItem) -> dict[str, Any]:
    field = f"input[{number}]"
    if item.type != "message":
        raise Unsupported(f"{field}.type", "must be message: this service keeps no state and calls no tools here")
    if item.role in ("tool", "function"):
        raise Unsupported(f"{field}.role", "must be system, developer, user or assistant")
    if item.role is None or item.content is None:
        raise BadInput(field, "must have role and content")
    if isinstance(item.content, str):
        return {"role": item.role, "content": item.content}
    if any(part.type not in _TEXTS for part in item.content):
        raise Unsupported(f"{field}.content", "must be texts: the model reads nothing else")
    return {"role": item.role, "content": "".join(part.text or "" for part in item.content)}


def _format(given: TextFormat) -> dict[str, Any]:
    if given.type not in ("text", "json_object", "json_schema"):
        raise Unsupported("text.format.type", "must be text, json_object or json_schema")
    if given.type == "json_schema" and given.schema_ is None:
        raise BadInput("text.format.schema", "missing")
    return {"type": given.type, "json_schema": {"schema": given.schema_}}


class Response:
    """One answer while it comes."""

    def __init__(self, body: Responses, request_id: str, prompt_tokens: int) -> None:
        self._body, self._id, self._prompt_tokens = body, request_id, prompt_tokens
        self._created = int(time.time())
        self._texts: list[str] = []
        self._final: Final | None = None
        self._events = 0

    def take(self, chunk: Chunk) -> None:
        """Of a plain answer. Raises Cancelled."""
        self._texts.append(chunk.text)
        if chunk.final is not None:
            if chunk.final.finish_reason not in _STATUS:
                raise Cancelled("the request was cancelled")
            self._final = chunk.final

    def events(self, chunk: Chunk) -> list[dict[str, Any]]:
        """The events that a stream says of it. Raises Cancelled."""
        return [self.event(kind, **said) for kind, said in self._said(chunk)]

    def event(self, kind: str, **said: Any) -> dict[str, Any]:
        self._events += 1
        return {"type": f"response.{kind}" if kind != "error" else kind, "sequence_number": self._events - 1, **said}

    def _said(self, chunk: Chunk) -> Iterator[tuple[str, dict[str, Any]]]:
        begins = not self._texts
        self.take(chunk)
        item = {"output_index": 0, "item_id": f"msg_{self._id}", "content_index": 0}
        if begins:
            yield "created", {"response": self._object("in_progress", [])}
            yield "in_progress", {"response": self._object("in_progress", [])}
            yield "output_item.added", {"output_index": 0, "item": self._item("in_progress", [])}
            yield "content_part.added", item | {"part": _part("")}
        if chunk.text:
            yield "output_text.delta", item | {"delta": chunk.text, "logprobs": []}
        if self._final is not None:
            text = "".join(self._texts)
            yield "output_text.done", item | {"text": text, "logprobs": []}
            yield "content_part.done", item | {"part": _part(text)}
            yield "output_item.done", {"output_index": 0, "item": self._item(self._status, [_part(text)])}
            yield self._status, {"response": self.whole()}

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
        item = self._item(self._status, [_part("".join(self._texts))])
        return self._object(self._status, [item]) | {"incomplete_details": why, "usage": usage}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        id = f"msg_{self._id}"
        return {"id": id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _object(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body
        format = body.text.format if body.text else None
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
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": body.temperature,
            "text": {"format": format.model_dump(by_alias=True, exclude_none=True) if format else {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
