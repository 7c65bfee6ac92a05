"""A body of OpenAI's Responses API to the chat that answers it: it needs no state on the server. Pure. What the answer
looks like is in response.py."""

from collections.abc import Sequence
from typing import Any

from gateway.http.errors import Unsupported
from gateway.openai import request
from gateway.openai.fields import Chat, Part
from gateway.openai.response_fields import (
    AllowedFunctions,
    FunctionTool,
    InputItem,
    NamedFunction,
    Responses,
    TextFormat,
)
from gateway.text import ALL, Takes
from gateway.validate import MAX_MESSAGES
from protos.errors import BadInput

# Parts of an answer that one may ask for, and that no answer here has.
_NO_PARTS = frozenset(
    {
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)
_NAMES = {"chat": "input", "max_tokens": "max_output_tokens", "response_format": "text"}  # of a chat's fields here
_TEXTS = ("input_text", "output_text")


def asked(body: Responses, request_id: str, takes: Takes = ALL) -> request.Asked:
    """`request_id`, `takes`: as in request.of_chat. The body names no items of earlier answers any more (kept.py).
    Raises BadInput."""
    if not _NO_PARTS.issuperset(body.include):
        raise Unsupported("include", "not supported: no answer here has such a part")
    spoken: list[dict[str, Any]] = [{"role": "user", "content": body.input}]
    messages = spoken if isinstance(body.input, str) else _messages(body.input)
    if body.instructions:
        if messages and messages[0]["role"] in ("system", "developer"):  # few templates take two
            messages[0]["content"] = f"{body.instructions}\n\n{messages[0]['content']}"
        else:
            messages.insert(0, {"role": "system", "content": body.instructions})
    if not messages:
        raise BadInput("input", "has no message")
    if len(messages) > MAX_MESSAGES:
        raise BadInput("input", f"{len(messages)} messages; at most {MAX_MESSAGES}")
    format = body.text.format if body.text else None
    chat = {
        "model": body.model,
        "messages": messages,
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": body.stream,
        "response_format": _format(format) if format else None,
        "tools": [_tool(f"tools[{i}]", tool) for i, tool in enumerate(body.tools)],
        "tool_choice": _choice(body.tool_choice),
        "chat_template_kwargs": body.chat_template_kwargs,
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        "request_id": body.request_id,
        "class": body.class_,
        "predicted_tokens": body.predicted_tokens,
        "timeout_s": body.timeout_s,
        "on_disconnect": body.on_disconnect,
    }
    return request.of_chat(Chat.model_validate(chat), request_id, takes, _NAMES)


def _messages(items: Sequence[InputItem]) -> list[dict[str, Any]]:
    """A call goes into the assistant's message before it, if there is one. Raises BadInput."""
    messages: list[dict[str, Any]] = []
    called: set[str] = set()
    for number, item in enumerate(items):
        field = f"input[{number}]"
        match item.type or "message":
            case "message":
                messages.append(_message(field, item))
            case "function_call":
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None, "tool_calls": []})
                messages[-1].setdefault("tool_calls", []).append(_call(field, item))
                called.add(item.call_id or "")
            case "function_call_output":
                if item.call_id not in called:
                    raise BadInput(f"{field}.call_id", "no call before it has this id: send the whole conversation")
                if item.output is None:
                    raise BadInput(f"{field}.output", "missing")
                messages.append({"role": "tool", "content": _text(f"{field}.output", item.output)})
            case "reasoning":
                pass  # of another service: no template shows the reasoning of earlier answers
            case "item_reference":
                raise Unsupported(
                    f"{field}.type", "item_reference: nothing is kept here, send the item (`store`: false)"
                )
            case _:
                kinds = "message, function_call, function_call_output, item_reference or reasoning"
                raise Unsupported(f"{field}.type", f"must be {kinds}")
    return messages


def _message(field: str, item: InputItem) -> dict[str, Any]:
    if item.role is None or item.content is None:
        raise BadInput(field, "must have role and content")
    if item.role not in ("system", "developer", "user", "assistant"):
        raise BadInput(f"{field}.role", "must be system, developer, user or assistant")
    return {"role": item.role, "content": _text(f"{field}.content", item.content)}


def _call(field: str, item: InputItem) -> dict[str, Any]:
    for name in ("call_id", "name"):
        if not getattr(item, name):
            raise BadInput(f"{field}.{name}", "missing")
    return {"function": {"name": item.name, "arguments": item.arguments or ""}}


def _text(field: str, content: str | list[Part]) -> str:
    if isinstance(content, str):
        return content
    if any(part.type not in _TEXTS for part in content):
        raise Unsupported(field, "must be texts: the model reads nothing else")
    return "".join(part.text or "" for part in content)


def _tool(field: str, tool: FunctionTool) -> dict[str, Any]:
    if tool.type != "function":
        raise Unsupported(f"{field}.type", "must be function: this service runs no tools of its own")
    if tool.name is None:
        raise BadInput(f"{field}.name", "missing: here a function's fields stand beside its type")
    told = {"name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    return {"type": "function", "function": told}


def _choice(given: str | NamedFunction | AllowedFunctions | None) -> str | dict[str, Any] | None:
    """As a chat says it."""
    match given:
        case NamedFunction():
            return {"type": "function", "function": {"name": given.name}}
        case AllowedFunctions():
            return {
                "type": "allowed_tools",
                "allowed_tools": {"mode": given.mode, "tools": [_choice(tool) for tool in given.tools]},
            }
    return given


def _format(given: TextFormat) -> dict[str, Any]:
    if given.type not in ("text", "json_object", "json_schema"):
        raise Unsupported("text.format.type", "must be text, json_object or json_schema")
    if given.type == "json_schema" and given.schema_ is None:
        raise BadInput("text.format.schema", "missing")
    return {"type": given.type, "json_schema": {"schema": given.schema_, "strict": given.strict}}
