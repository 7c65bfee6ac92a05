"""Structures that the tests of structured output ask for, and answers to them."""

import json
import re
from typing import Any

from jsonschema import validate

from protos.structure import grammar
from protos.v1.types_pb2 import Choice, Structure
from tests.worker.harness import Driver, Tiny
from worker_service.engine.types import Limits, Sampling

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 500},
        "ok": {"type": "boolean"},
        "colour": {"enum": ["red", "green"]},
    },
    "required": ["name", "age", "ok", "colour"],
    "additionalProperties": False,
}
KINDS = {
    "json_schema": Structure(json_schema=json.dumps(SCHEMA)),
    "json_object": Structure(json_object=True),
    "regex": Structure(regex="[a-f]{3,9}[0-9]{1,4}"),
    "choice": Structure(choice=Choice(texts=["red", "reddish", "grün 😀", 'a "quote"\n'])),
    "lark": Structure(lark='start: "(" x ")" | "{" x "}"\nx: /[0-9]{1,3}/ ("+" x)?'),
}
# Few texts, and more than one way to write them in tokens.
FEW = grammar(Structure(regex="(the|one)( one)?"))
LIMITS = Limits(max_tokens=90)
PROMPT = "A short request overtakes"


def text_of(tiny: Tiny, tokens: list[int]) -> str:
    return str(tiny.tokenizer.decode(tokens, skip_special_tokens=True))


def has(kind: str, text: str) -> bool:
    """Whether a whole text has the structure of KINDS[kind], by other means than llguidance."""
    match kind:
        case "json_schema":
            validate(json.loads(text), SCHEMA)
            return " " not in text.replace(json.loads(text)["name"], "")
        case "json_object":
            return isinstance(json.loads(text), dict)
        case "regex":
            return re.fullmatch("[a-f]{3,9}[0-9]{1,4}", text) is not None
        case "choice":
            return text in KINDS["choice"].choice.texts
    number = r"[0-9]{1,3}(\+[0-9]{1,3})*"
    return re.fullmatch(rf"\({number}\)|\{{{number}\}}", text) is not None


def answer(tiny: Tiny, own: Sampling, limits: Limits = LIMITS, **engine: Any) -> Driver:
    driver = Driver(tiny.engine(**engine))
    driver.admit("r", tiny.prompt(PROMPT), limits, own)
    driver.finish_all()
    return driver
