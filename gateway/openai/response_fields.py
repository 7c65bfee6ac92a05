"""The body of POST /v1/responses. As in fields.py: nothing is decided about a request here."""

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.openai.fields import MAX_TOOLS, Body, Count, Items, Name, Own, Part, Rendered
from gateway.validate import MAX_MESSAGES

MAX_ITEMS = 4 * MAX_MESSAGES  # of an input: several may become one message

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class TextFormat(Body):
    type: str = Field(description="text, json_object or json_schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = Field(None, description="false: what no grammar can hold to is left out, else refused")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="required with json_schema")


class TextOptions(Body):
    format: TextFormat | None = None


class InputItem(Body):
    type: str | None = Field(
        None, description="message, function_call, function_call_output, item_reference or reasoning"
    )
    id: str | None = Field(None, description="with item_reference: of an item of an earlier answer")
    role: str | None = Field(None, description="of a message: system, developer, user or assistant")
    content: str | Items[Part] | None = Field(None, description="of a message")
    call_id: str | None = Field(None, description="of a call, and of what came of it")
    name: str | None = Field(None, description="of a call: the function")
    arguments: str | None = Field(None, description="of a call")
    output: str | Items[Part] | None = Field(None, description="what came of a call")


class FunctionTool(Body):
    """A function, told flat. Its fields are checked once its type is known: other types have others."""

    type: str = Field(description="function")
    name: Name | None = Field(None, description="required")
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema of an object")
    strict: bool | None = Field(None, description="true: a schema that cannot be held to is refused")


class NamedFunction(Body):
    type: Literal["function"]
    name: str


class AllowedFunctions(Body):
    """None but some of the tools may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Items[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS)]


class Responses(Own, Rendered):
    """POST /v1/responses, without any state on the server."""

    model: str
    input: str | Annotated[Items[InputItem], Field(min_length=1, max_length=MAX_ITEMS)]
    instructions: str | None = Field(None, description="goes before the input, as a system message")
    max_output_tokens: Count | None = Field(None, description="without it: what is left of the context")
    temperature: float = Field(1.0, description="in [0, 2]; 0: greedy")
    top_p: float | None = Field(None, description="in (0, 1]")
    text: TextOptions | None = None
    tools: Annotated[Items[FunctionTool], Field(max_length=MAX_TOOLS)] = Field([], description="functions")
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions | None = Field(
        None, description="auto, the default with tools: words, a call, or both"
    )
    include: Items[str] = Field([], description="parts that an answer here never has; others are refused")
    parallel_tool_calls: bool = Field(True, description="without effect: an answer has one call at most")
    metadata: Metadata = Field({}, description="told back; at most 16 pairs, of 64 and 512 characters")
    stream: bool = False
