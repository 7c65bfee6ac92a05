"""Functions that an answer may call: what the model is told, which answers its grammar lets through, and how a call is
told, whole and streamed, with the name first and the arguments as they grow."""

import json
import re
from functools import cache
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel, Field, SecretStr, WithJsonSchema

from gateway.chunk import Chunk
from gateway.metrics import Metrics
from gateway.openai import formats, request, tools
from gateway.openai.choice import Choice
from gateway.openai.fields import Chat
from gateway.openai.parse import parse
from gateway.text import TextModel
from protos.errors import BadInput
from protos.structure import grammar
from protos.v1 import types_pb2
from protos.v1.inference_pb2 import Final
from tests.gateway.harness import TEMPLATE, TOKENIZER, model_info
from tests.gateway.openai.harness import CHAT, door

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
OPEN = {name: value for name, value in SCHEMA.items() if name != "additionalProperties"}
MORE = '{"city":"Rome","more":1}'


def with_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "parameters": schema}}


WEATHER = with_schema(SCHEMA)
NAMED = {"type": "function", "function": {"name": "weather"}}
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "description": "the sum"}}
ARGUMENTS = '{"city":"Rome"}'
CALL = f'<tool_call>{{"name": "weather", "arguments": {ARGUMENTS}}}'
STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH


def body(**fields: Any) -> Chat:
    return parse(Chat, json.dumps(CHAT | {"tools": [WEATHER, ADD]} | fields).encode())


def choice(**fields: Any) -> Choice:
    figures, may = Metrics().answer(), tools.callable_in(body(**fields))
    return Choice(0, "r", figures=figures, chat=True, of=SimpleNamespace(), may=may)  # type: ignore[arg-type]


def of_form(form: types_pb2.Structure) -> Choice:
    """Resumed: of the request only the form is known."""
    may, figures = tools.resumed(form), Metrics().answer()
    return Choice(0, "r", figures=figures, chat=True, of=SimpleNamespace(), may=may, marked=True)  # type: ignore[arg-type]


def chunks(text: str, reason: int = STOP, *, cut: int = 1) -> list[Chunk]:
    """So many characters each, then the end."""
    said = [Chunk(text=text[i : i + cut], token_ids=[i]) for i in range(0, len(text), cut)]
    return [*said, Chunk(final=Final(finish_reason=reason))]  # type: ignore[arg-type]


def whole(one: Choice, text: str, reason: int = STOP) -> dict[str, Any]:
    for chunk in chunks(text, reason):
        one.take(chunk)
    return one.whole()


def streamed(one: Choice, text: str, reason: int = STOP, *, cut: int = 1) -> list[dict[str, Any]]:
    return [entry for chunk in chunks(text, reason, cut=cut) for entry in one.events(chunk)]


@cache
def bytes_for_tokens() -> LLTokenizer:
    return LLTokenizer("byte")


def lets_through(text: str, **fields: Any) -> bool:
    """Whether that can be the whole answer."""
    asked = body(**fields)
    structure, _ = formats.structure(asked, tools.callable_in(asked))
    return structure is None or fits(text, structure)


def fits(text: str, structure: types_pb2.Structure) -> bool:
    matcher = LLMatcher(bytes_for_tokens(), grammar(structure), log_level=0)
    assert not matcher.get_error()
    data = list(text.encode())
    return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("fields", "passes"),
    [
        ({}, {"": True, "No <b>idea</b>.\n": True, CALL: True, f"I look.\n{CALL}": True, f"{CALL}.": False}),
        ({}, {"<tool_call>now": False, CALL.replace("weather", "nobody"): False, CALL.replace("city", "town"): False}),
        ({}, {"<tool_call>": False, "<tool_cal": True, CALL + CALL: False, CALL[:-1]: False}),
        ({"tool_choice": "none"}, {"<tool_call>now": True}),
        ({"tool_choice": "required"}, {CALL: True, ARGUMENTS: False, "": False, f"I look. {CALL}": False}),
        ({"tool_choice": NAMED}, {ARGUMENTS: True, CALL: False}),
        ({"tools": [WEATHER], "tool_choice": "required"}, {ARGUMENTS: True, '{"city":1}': False}),
        ({"tools": [with_schema(OPEN)], "tool_choice": "required"}, {ARGUMENTS: True, MORE: False}),
        ({"tools": [with_schema(OPEN | {"additionalProperties": True})], "tool_choice": "required"}, {MORE: True}),
        ({"response_format": {"type": "json_object"}}, {CALL: True, '{"a":1}': True, "words": False}),
        ({"tools": [ADD], "tool_choice": "required"}, {"{}": True, '{"a":1}': False}),  # it has no parameters
        ({"tools": [ADD]}, {'<tool_call>{"name": "add", "arguments": {}}': True}),
    ],
)
def test_an_answer_is_what_its_tools_allow(fields: dict[str, Any], passes: dict[str, bool]) -> None:
    assert {text: lets_through(text, **fields) for text in passes} == passes


class Circle(BaseModel):
    kind: Literal["circle"]
    radius: float


class Square(BaseModel):
    kind: Literal["square"]
    side: float


class Drawing(BaseModel):
    """What people write for their functions: no grammar can hold an answer to all of it."""

    shape: Circle | Square = Field(discriminator="kind")
    colours: set[str]
    sizes: dict[Literal["small", "large"], int]
    data: bytes
    secret: SecretStr
    pattern: Annotated[str, WithJsonSchema({"type": "string", "pattern": r"^(?!\.)\S+$"})]
    word: Annotated[str, WithJsonSchema({"type": "string", "pattern": r"^\b\w+$"})]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_what_of_a_schema_cannot_be_held_to_is_ignored_unless_it_is_strict(choice: str) -> None:
    drawing = with_schema(Drawing.model_json_schema())
    arguments = {
        "shape": {"kind": "square", "side": 1},
        "colours": ["red", "red"],
        "sizes": {},
        "data": "",
        "secret": "",
        "pattern": ".",
        "word": ".",
    }
    text = json.dumps(arguments, separators=(",", ":"))
    call = text if choice == "required" else CALL.replace(ARGUMENTS, text)
    assert lets_through(call, tools=[drawing], tool_choice=choice)
    drawing["function"]["strict"] = True
    structure = tools.structure(tools.callable_in(body(tools=[drawing], tool_choice=choice)), None)
    assert structure is not None
    assert LLMatcher.validate_grammar(grammar(structure), bytes_for_tokens())


async def test_a_function_whose_schema_is_refused_takes_any_object_unless_it_is_strict() -> None:
    """The others are held to theirs."""
    free: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "any"}}}
    other: dict[str, Any] = {"type": "function", "function": {"name": "other", "parameters": free}}
    asked = CHAT | {"tools": [WEATHER, other], "tool_choice": "required"}
    async with door(context_tokens=2048) as opened:
        answer, submit = await opened.answered(asked)
        assert answer.status_code == 200
        for call, passes in {
            CALL: True,
            CALL.replace("city", "town"): False,
            CALL.replace("weather", "other").replace("city", "town"): True,
        }.items():
            assert fits(call, submit.sampling.structure) == passes
        _, submit = await opened.answered(asked | {"tools": [other]})
        assert fits(MORE, submit.sampling.structure)
        other["function"]["strict"] = True
        refused = await opened.refused(asked)
        assert (refused["status"], refused["param"]) == (400, "tools")
        assert "Invalid type: any" in refused["message"]


async def test_no_request_has_more_than_a_few_refused_schemas_compiled_alone() -> None:
    many = [{"type": "function", "function": {"name": f"f{i}", "parameters": SCHEMA}} for i in range(20)]
    asked, checked = body(tools=many), list[types_pb2.Structure]()

    async def check(structure: types_pb2.Structure) -> None:
        checked.append(structure)
        raise BadInput("structure", "too hard")

    loose = await formats.loosened(asked, tools.callable_in(asked), check)
    assert len(checked) == formats.MOST_REFUSED
    assert fits(CALL.replace("weather", "f19").replace("city", "town"), loose)


def test_the_model_is_told_of_them_in_the_system_message() -> None:
    asked = request.of_chat(body(messages=[{"role": "system", "content": "Be kind."}, *CHAT["messages"]]), "r")
    system, user = asked.requests[0].chat.messages
    assert (system.role, user.role) == ("system", "user")
    begin, *lines, how = system.content.split("\n")
    assert begin == "Be kind."
    functions = [json.loads(line) for line in lines if line.startswith("{")]
    assert [each["name"] for each in functions] == ["weather", "add"]
    assert functions[0]["parameters"] == SCHEMA
    assert tools.MARK in how


def test_the_model_reads_of_them_what_was_written() -> None:
    tool = {"type": "function", "function": {"name": "add", "description": "größer, 大きい"}}
    assert '"description": "größer, 大きい"' in tools.told(tools.callable_in(body(tools=[tool])))


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('take turns') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
DROPS = "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ASKS = "{% for m in messages %}{{ m.role }} {{ tone[0] }}: {{ m.content }}\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "takes"),
    [
        (TEMPLATE, (True, True)),
        (STRICT, (False, False)),
        (DROPS, (False, True)),
        (ASKS, (True, True)),
        ("", (True,) * 2),
    ],
)
def test_what_a_template_takes_is_found_out(template: str, takes: tuple[bool, bool]) -> None:
    assert TextModel(model_info(template=template)).takes == takes


@pytest.mark.parametrize("template", [STRICT, DROPS])
async def test_a_template_without_system_messages_has_the_tools_before_what_the_user_says(template: str) -> None:
    async with door(template=template, context_tokens=2048) as at:
        for path, body in (("", CHAT), ("/v1/responses", {"model": "tiny", "input": "the fox"})):
            tool = {"type": "function", **WEATHER["function"]} if path else WEATHER
            task = at.asked(body | {"tools": [tool]}, path)
            submit = await at.link.accept()
            prompt = TOKENIZER.decode(list(submit.prompt))
            assert prompt.startswith("user: These functions can be called:")
            assert prompt.endswith("\n\nthe fox\n")
            await at.say(submit, "jumps")
            assert (await task).status_code == 200


@pytest.mark.parametrize(("template", "turns"), [(STRICT, 3), (DROPS, 4)])
async def test_what_the_user_says_behind_a_result_is_a_message_of_its_own_only_where_that_is_taken(
    template: str, turns: int
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    said = [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
        {"role": "user", "content": "and now?"},
    ]
    async with door(template=template, context_tokens=2048) as at:
        answer, submit = await at.answered(CHAT | {"messages": said})
        assert answer.status_code == 200
        prompt = TOKENIZER.decode(list(submit.prompt))
        assert len(re.findall("^(user|assistant): ", prompt, re.MULTILINE)) == turns
        between = "\n\n" if turns == 3 else "\nuser: "
        assert prompt.endswith(f"<tool_response>sunny</tool_response>{between}and now?\n")


def test_where_it_may_call_nothing_it_is_told_of_nothing() -> None:
    asked = request.of_chat(body(tool_choice="none"), "r")
    assert [message.role for message in asked.requests[0].chat.messages] == ["user"]


@pytest.mark.parametrize("fields", [{"tool_choice": NAMED}, {"tool_choice": "required", "tools": [WEATHER]}])
def test_of_the_only_function_that_it_may_call_it_is_told_what_the_arguments_mean(fields: dict[str, Any]) -> None:
    told, _ = request.of_chat(body(**fields), "r").requests[0].chat.messages
    assert told.role == "system"
    assert json.dumps(WEATHER["function"]["parameters"]) in told.content
    assert told.content.endswith("Write its arguments as JSON and nothing else.")


def test_earlier_calls_and_what_came_of_them_are_part_of_the_conversation() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    messages = [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
        {"role": "tool", "tool_call_id": "d", "content": [{"type": "text", "text": "warm"}]},
    ]
    asked = request.of_chat(body(messages=messages, tool_choice="none"), "r").requests[0].chat.messages
    assert [(message.role, message.content) for message in asked[1:]] == [
        ("assistant", CALL),
        ("user", "<tool_response>sunny</tool_response>\n\n<tool_response>warm</tool_response>"),
    ]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice: names a function that"),
        ({"tools": [WEATHER, WEATHER]}, "tools: two functions have the same name"),
        *(
            ({"structured_outputs": form}, "tool_choice: auto goes together with JSON only")
            for form in ({"regex": "a"}, {"json": "[" * 5000}, {"json": '{"a":' * 500 + "1" + "}" * 500})
        ),
        *(
            ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": kind}}}]}, "tools: param")
            for kind in ("string", "array", ["object", "null"])
        ),
    ],
)
def test_what_is_wrong_with_tools_is_told(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadInput, match=f"^{problem}"):
        request.of_chat(body(**fields), "r")


@pytest.mark.parametrize(
    ("fields", "text", "words"),
    [
        ({}, CALL, None),
        ({}, f"I look. {CALL}", "I look. "),
        ({"tool_choice": "required"}, CALL, None),
        ({"tool_choice": NAMED}, ARGUMENTS, None),
    ],
)
@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_a_call_is_told_whole_and_streamed(fields: dict[str, Any], text: str, words: str | None, cut: int) -> None:
    said = whole(choice(**fields), text)
    function = {"name": "weather", "arguments": ARGUMENTS}
    call = {"id": "call_r", "type": "function", "function": function}
    assert said["finish_reason"] == "tool_calls"
    assert said["message"] == {"role": "assistant", "content": words, "refusal": None, "tool_calls": [call]}

    entries = streamed(choice(**fields), text, cut=cut)
    deltas = [entry["delta"] for entry in entries]
    calls: list[Any] = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert [delta.get("role") for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.get("content") or "" for delta in deltas) == (words or "")
    assert [call["function"].get("name") for call in calls] == ["weather"] + [None] * (len(calls) - 1)
    assert [call.get("id") for call in calls] == ["call_r"] + [None] * (len(calls) - 1)
    assert "".join(call["function"]["arguments"] for call in calls) == ARGUMENTS
    assert [entry["finish_reason"] for entry in entries] == [None] * (len(entries) - 1) + ["tool_calls"]


@pytest.mark.parametrize("text", ["Hello.", "a < b", "ends with <tool_", ""])
def test_words_are_told_as_if_there_were_no_tools(text: str) -> None:
    """That there are none is told, too: a message without content could not be sent back."""
    said = whole(choice(), text)
    assert (said["message"]["content"], said["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in said["message"]
    contents = [
        entry["delta"]["content"] for entry in streamed(choice(), text) if entry["delta"].get("content") is not None
    ]
    assert contents
    assert "".join(contents) == text


FORMED = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize("cut", [1, 7, 1000])
@pytest.mark.parametrize("again", [False, True], ids=["asked", "resumed"])
def test_within_words_that_have_a_form_the_mark_is_theirs(cut: int, again: bool) -> None:
    text = f'{{"a": "use {CALL} so"}}'
    choices = [choice(**FORMED), choice(**FORMED)]
    if again:
        form, _ = formats.structure(body(**FORMED), tools.callable_in(body(**FORMED)))
        assert form is not None
        choices = [of_form(form), of_form(form)]
    assert whole(choices[0], text)["message"]["content"] == text
    entries = streamed(choices[1], text, cut=cut)
    assert "".join(entry["delta"].get("content") or "" for entry in entries) == text
    assert entries[-1]["finish_reason"] == "stop"


def test_a_call_may_still_take_the_place_of_words_that_have_a_form() -> None:
    said = whole(choice(**FORMED), CALL)
    assert (said["finish_reason"], said["message"]["content"]) == ("tool_calls", None)


def test_of_an_answer_that_must_be_a_call_no_part_of_the_mark_is_told() -> None:
    for cut_off in range(1, CALL.index('{"name": "') + 1):
        said = whole(choice(tool_choice="required"), CALL[:cut_off], LENGTH)
        assert (said["finish_reason"], said["message"]["content"]) == ("length", "")
        entries = streamed(choice(tool_choice="required"), CALL[:cut_off], LENGTH)
        assert not any(entry["delta"].get("content") for entry in entries)


def test_an_earlier_answer_that_could_call_nothing_is_words() -> None:
    assert tools.said(CALL, types_pb2.Structure()) == (CALL, "", "")
    form, _ = formats.structure(body(), tools.callable_in(body()))
    assert form is not None
    assert tools.said(f"I look. {CALL}", form) == ("I look. ", "weather", ARGUMENTS)


@pytest.mark.parametrize("cut_off", range(1, len(CALL)))
def test_a_call_that_is_cut_short_says_so(cut_off: int) -> None:
    said = whole(choice(), CALL[:cut_off], LENGTH)
    assert said["finish_reason"] == "length"
    begun = CALL[:cut_off].partition('"arguments": ')[2]
    called = said["message"].get("tool_calls")
    assert (called[0]["function"]["arguments"] if called else "") == begun
    assert called or said["message"]["content"] is not None


def test_arguments_that_are_nested_without_end_are_told_as_they_came() -> None:
    begun = '{"place": ' + "[" * 5000
    said = whole(choice(), f'<tool_call>{{"name": "weather", "arguments": {begun}', STOP)
    assert said["finish_reason"] == "stop"
    assert said["message"]["tool_calls"][0]["function"]["arguments"] == begun


def test_a_call_that_a_stop_string_ends_within_its_arguments_is_no_call_that_can_be_made() -> None:
    for cut_off in range(CALL.index('"arguments": ') + 13, len(CALL) - 1):
        said = whole(choice(), CALL[:cut_off], STOP)
        assert said["finish_reason"] == "stop"
        assert said["message"]["tool_calls"][0]["function"]["arguments"] == CALL[:cut_off].partition('"arguments": ')[2]
