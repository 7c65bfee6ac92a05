"""The table of fields: what the bodies of the OpenAI-compatible calls may hold, and what happens to each field.

A field of a model below, of response_fields.py and of inputs.py is honoured; refused.py lists others that are known.
`null` is as good as absent, everywhere. The OpenAPI document is made from the same models. Nothing is decided about a
request here.
"""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from gateway.validate import MAX_MESSAGES

MAX_CHOICES = 16  # of one prompt
MAX_ANSWERS = 128  # to one body: prompts times choices
MAX_LOGPROBS = 20
MAX_TOOLS = 128
UINT32 = 2**32 - 1
INT64 = 2**63


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 16.0 is as good as 16."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)  # behind the bounds: so they are in the OpenAPI document
Count = Annotated[int, Field(ge=0, le=UINT32), WHOLE]
Positive = Annotated[int, Field(ge=1, le=UINT32), WHOLE]
Item = TypeVar("Item")
Items = Annotated[list[Item], Field(fail_fast=True)]  # read no further than the first wrong one: there may be 500,000


def _all_whole(value: Any) -> Any:
    """As _whole, for a long list: no function of Python's is called for each item unless one is such a number."""
    return [_whole(each) for each in value] if isinstance(value, list) and float in set(map(type, value)) else value


TokenIds = Annotated[Items[Annotated[int, Field(ge=0, le=UINT32)]], BeforeValidator(_all_whole)]


class Body(BaseModel):
    """A JSON object. Unknown fields are kept apart, in `model_extra`."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


class StreamOptions(Body):
    include_usage: bool = Field(False, description="a last chunk without choices has the usage")
    continuous_usage_stats: bool = Field(False, description="every chunk has the usage so far")


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    strict: bool | None = Field(None, description="false: what no grammar can hold to is left out, else refused")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="required")


class ResponseFormat(Body):
    type: str = Field(description="text, json_object or json_schema")
    json_schema: JsonSchema | None = Field(None, description="with the type json_schema")


class StructuredOutputs(Body):
    """vLLM's object. Exactly one of its fields."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="a JSON schema")
    json_object: bool | None = None
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = Field(None, description="in llguidance's variant of Lark")


class Own(Body):
    """Fields that are this service's own."""

    request_id: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="an id of the client's own; the header Idempotency-Key does the same, and detaches"
    )
    class_: Literal["interactive", "default", "batch"] = Field(
        "default",
        alias="class",
        description="how urgent it is; without it X-SMG-Priority: system, interactive, bulk (batch)",
    )
    predicted_tokens: Positive | None = Field(None, description="the client's guess of the answer's length in tokens")
    timeout_s: Annotated[float, Field(gt=0)] | None = Field(None, description="the answer must be whole by then")
    on_disconnect: Literal["cancel", "detach"] = Field("cancel", description="detach: it runs on, and can be resumed")


class Generation(Own):
    """What chat completions and completions have in common."""

    model: str
    max_completion_tokens: Count | None = Field(None, description="goes before max_tokens")
    max_tokens: Count | None = Field(None, description="output tokens at most; 0: the prompt is only scored")
    min_tokens: Count = Field(0, description="output tokens before the answer may end")
    temperature: float = Field(1.0, description="in [0, 2]; 0: greedy")
    top_p: float | None = Field(None, description="in (0, 1]")
    top_k: Annotated[int, Field(ge=-1, le=UINT32), WHOLE] = Field(0, description="0 and -1: all tokens")
    presence_penalty: float = Field(0.0, description="in [-2, 2]")
    frequency_penalty: float = Field(0.0, description="in [-2, 2]")
    repetition_penalty: float | None = Field(None, description="in [0.01, 2]")
    logit_bias: dict[str, float] = Field({}, description="token id to bias, in [-100, 100]")
    stop: str | Items[str] = Field([], description="at most 8, of 1 to 128 characters")
    ignore_eos: bool = False
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = Field(
        None, description="those of the prompt, in vLLM's shape; tokens of the prompt, times one more: at most 32768"
    )
    seed: Annotated[int, Field(ge=-INT64, lt=INT64), WHOLE] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


class Part(Body):
    type: str = Field(description="text")
    text: str | None = None


class CalledFunction(Body):
    name: str
    arguments: str = ""


class ToolCall(Body):
    function: CalledFunction


class Message(Body):
    role: str = Field(description="system, developer, user, assistant or tool")
    content: str | Items[Part] | None = None
    tool_calls: Items[ToolCall] = Field([], description="of an assistant's message: earlier calls")


Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(Body):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] = Field({"type": "object", "properties": {}}, description="a JSON schema of an object")
    strict: bool | None = Field(None, description="true: a schema that cannot be held to is refused")


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class Allowed(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[Items[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Body):
    """OpenAI's: none but some of the tools may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


class Rendered(Body):
    """How the model's chat template is rendered, under vLLM's names."""

    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="further variables of the model's chat template, such as enable_thinking; at most 8192 bytes"
    )
    add_generation_prompt: bool | None = Field(None, description="true, unless the final message goes on")
    continue_final_message: bool = Field(False, description="the answer goes on with the last message's text")


class Chat(Generation, Rendered):
    """POST /v1/chat/completions. Without max_tokens the answer may fill what is left of the context."""

    messages: Annotated[Items[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = None
    tools: Annotated[Items[Tool], Field(max_length=MAX_TOOLS)] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = Field(
        None, description="auto, the default with tools: words, a call, or both"
    )


class Completion(Generation):
    """POST /v1/completions. Without max_tokens an answer has 16 tokens at most, as OpenAI's and vLLM's."""

    prompt: str | Items[str] | TokenIds | Items[TokenIds]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None = None
    echo: bool = Field(False, description="the prompt goes before the answer; with logprobs, its own are told, too")


class Tokenize(Rendered):
    """POST /tokenize: prompt or messages."""

    model: str
    prompt: str | None = None
    messages: Annotated[Items[Message], Field(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[Items[Tool], Field(max_length=MAX_TOOLS)] = Field([], description="with messages")
    add_special_tokens: bool = Field(True, description="with prompt: those that the tokenizer adds")
    return_token_strs: bool = Field(False, description="the tokens are told as text, too")


class Detokenize(Body):
    """POST /detokenize."""

    model: str
    tokens: TokenIds
