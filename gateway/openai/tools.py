"""Functions that an answer may call: what the model is told of them, the form that its answer must then have, and how a
call, or what came of one, is written into a conversation. The model's template need know nothing of it: all is plain
text. Pure."""

import json
from typing import Any, NamedTuple

from pydantic_core import from_json

from gateway.openai import schemas
from gateway.openai.fields import AllowedTools, Chat, Function, ToolCall
from protos.errors import BadInput
from protos.v1.types_pb2 import Structure

MARK = "<tool_call>"  # where an answer's words end and a call begins; the form that many models were trained on
_NAME, _ARGUMENTS, _END = '{"name": "', '", "arguments": ', "}"


class MayCall(NamedTuple):
    """`must`: the answer is a call; else it may be one, behind words or not. `formed`: words have a form of their own,
    and no call goes behind them."""

    functions: tuple[Function, ...] = ()
    must: bool = False
    formed: bool = False

    @property
    def only(self) -> str:
        """The function whose arguments the answer is, without a mark; empty: calls are marked."""
        return self.functions[0].name if self.must and len(self.functions) == 1 else ""


NOTHING = MayCall()


def callable_in(body: Chat) -> MayCall:
    """The functions that the answer may call. Raises BadInput."""
    functions = tuple(tool.function for tool in body.tools)
    choice = body.tool_choice or "auto"
    if choice == "none" or (choice == "auto" and not functions):
        return NOTHING
    if not functions:
        raise BadInput("tool_choice", "there are no tools to choose from")
    if len({function.name for function in functions}) < len(functions):
        raise BadInput("tools", "two functions have the same name")
    form = body.response_format
    formed = body.structured_outputs is not None or (form is not None and form.type != "text")
    if isinstance(choice, str):
        return MayCall(functions, choice == "required", formed)
    if isinstance(choice, AllowedTools):
        chosen, must = choice.allowed_tools.tools, choice.allowed_tools.mode == "required"
    else:
        chosen, must = [choice], True
    names = {tool.function.name for tool in chosen}
    if not names <= {function.name for function in functions}:
        raise BadInput("tool_choice", "names a function that is not in tools")
    named = tuple(function for function in functions if function.name in names)
    return MayCall(named, must, formed)


def told(may: MayCall) -> str:
    """The system message about them; empty where there are none."""
    if not may.functions:
        return ""
    described = (
        {"name": each.name, "description": each.description or "", "parameters": each.parameters}
        for each in may.functions
    )
    lines = [json.dumps(each, ensure_ascii=False) for each in described]
    if may.only:
        return "\n".join(["Your answer calls this function:", *lines, "Write its arguments as JSON and nothing else."])
    form = f'{MARK}{_NAME}NAME{_ARGUMENTS}{{"PARAMETER": VALUE}}{_END}'
    how = f"To call one, write {form} and nothing after it. You are then told its result."
    return "\n".join(["These functions can be called:", *lines, how + " Call one now." * may.must])


def structure(may: MayCall, form: Structure | None) -> Structure | None:
    """`form`: of an answer that calls nothing; None: any words. Raises BadInput."""
    if may.only:
        return arguments(may.functions[0])
    parameters = [_object(function) for function in may.functions]
    if not parameters:
        return form
    rules = []
    for i, (function, schema) in enumerate(zip(may.functions, parameters, strict=True)):
        head = json.dumps(f"{_NAME}{function.name}{_ARGUMENTS}")
        rules += [f"call{i}: {head} arguments{i} {json.dumps(_END)}", f"arguments{i}: {_json(schema)}"]
    called = "call: " + " | ".join(f"call{i}" for i in range(len(parameters)))
    marked = f"marked: {json.dumps(MARK)} call"
    if may.must:
        begin = ["start: marked", marked]
    elif form is not None:
        begin = ["start: form | marked", f"form: {_json(_schema(form))}", marked]
    else:  # the mark is looked for in the words, and what follows it is a call
        any_text = r"/(.|\n)*/"
        begin = ["start: WORDS | marked", f"WORDS: {any_text}", "marked: before call"]
        begin.append(f"before[suffix={json.dumps(MARK)}]: {any_text}")
    return Structure(lark="\n".join([*begin, called, *rules]))


def arguments(function: Function) -> Structure:
    """The form of its arguments. Raises BadInput."""
    return Structure(json_schema=json.dumps(_object(function)))


def may_mark(form: Structure) -> bool:
    """Whether an answer in this form, which `structure` made, may have a call behind a mark."""
    return "\nmarked: " in form.lark and MARK in form.lark


def resumed(form: Structure) -> MayCall:
    """What is known of the calls of an answer in such a form: all but the functions."""
    return MayCall(must=form.lark.startswith("start: marked\n"), formed=form.lark.startswith("start: form "))


def written(call: ToolCall) -> str:
    """An earlier call, as the model writes one."""
    return f"{MARK}{_NAME}{call.function.name}{_ARGUMENTS}{call.function.arguments or '{}'}{_END}"


def said(text: str, form: Structure) -> tuple[str, str, str]:
    """The words of an earlier answer in this form, the function that it calls behind them, if any, and its
    arguments."""
    if not may_mark(form):
        return text, "", ""
    calling = Calling(resumed(form))
    pushed, held = calling.push(text), calling.end(whole=True)
    return (pushed[0] + held[0], calling.name, pushed[1] + held[1]) if calling.name else (text, "", "")


def result(text: str) -> str:
    """What came of a call, as the user says it."""
    return f"<tool_response>{text}</tool_response>"


class Calling:
    """An answer's text while it comes: what of it is words, and what is the call. `whole`: once it has ended, whether
    it has a call with all of its arguments."""

    def __init__(self, may: MayCall) -> None:
        self.name = may.only
        self._marked, self._in_call = not may.only, bool(may.only)
        self._must, self._formed = may.must, may.formed
        self._only_words = False  # they have a form, and have begun: a mark in them is theirs
        self._held = ""
        self._arguments: list[str] = []
        self.whole = False

    def push(self, text: str) -> tuple[str, str]:
        """The text that is added to the words, and the text that is added to the call's arguments."""
        words, self._held = "", self._held + text
        if self._formed and not self._in_call and not MARK.startswith(self._held[: len(MARK)]):
            self._only_words = True
        if self._only_words:
            words, self._held = self._held, ""
            return words, ""
        if not self._in_call:
            words, mark, rest = self._held.partition(MARK)
            self._in_call = bool(mark)
            if not mark:
                rest = next((MARK[:n] for n in range(len(MARK) - 1, 0, -1) if words.endswith(MARK[:n])), "")
                words = words.removesuffix(rest)
            self._held = rest
        if self._in_call and not self.name:
            name, between, rest = self._held.partition(_ARGUMENTS)
            if between:
                self.name, self._held = name.removeprefix(_NAME), rest
        if not self.name:
            return words, ""
        keep = len(_END) if self._marked else 0  # it may be the end, which is not of the arguments
        arguments = self._held[: len(self._held) - keep]
        self._held = self._held[len(arguments) :]
        self._arguments.append(arguments)
        return words, arguments

    def end(self, *, whole: bool) -> tuple[str, str]:
        """The same of what was held back. `whole`: the answer was not cut. A stop string may have cut its call."""
        held, self._held = self._held, ""
        if not self._in_call:  # a mark that has begun is words, but where the answer is a call
            return "" if self._must else held, ""
        self.whole = whole and bool(self.name) and _is_json("".join(self._arguments))
        return "", "" if self.whole or not self.name else held


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_int=str)  # Python makes no numbers of thousands of digits
    except (ValueError, RecursionError):
        return False
    return True


def _schema(form: Structure) -> dict[str, Any]:
    """Raises BadInput."""
    match form.WhichOneof("kind"):
        case "json_object":
            return {"type": "object"}
        case "json_schema":
            try:
                schema = from_json(form.json_schema)
            except ValueError:
                schema = None
            if isinstance(schema, dict):
                return schema
    raise BadInput("tool_choice", "auto goes together with JSON only, no other form")


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps({'x-guidance': {'whitespace_flexible': False}} | schema)}"


def _object(function: Function) -> dict[str, Any]:
    """The schema of a function's arguments. One function whose schema cannot be held to would keep all others from
    being called: so those that are not strict are taken without that. Of what is refused all the same:
    formats.loosened. Raises BadInput."""
    schema = {"type": "object", **function.parameters}
    if schema["type"] != "object":
        raise BadInput("tools", f"parameters of {function.name} must be a schema of the type object")
    if schema.get("properties") == {} and not schema.get("required") and schemas.KEEPS_OPEN.isdisjoint(schema):
        schema["additionalProperties"] = False  # it takes nothing
    return schemas.strict(schema) if function.strict else schemas.lenient(schema)
