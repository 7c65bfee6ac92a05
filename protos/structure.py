"""The grammar, in llguidance's own form, of what a Structure asks for: gateway and worker make it alike. Nothing is
compiled here."""

import json

from llguidance import LLMatcher

from protos.v1.types_pb2 import Structure

# Where two terminals compete for the same text, llguidance 1.9 may find a byte to be forced for ever, and never return.
# That cannot happen in the grammars that it makes itself.
_FORCES_NOTHING = '\n%llguidance {"no_forcing": true}\n'


def grammar(structure: Structure) -> str:
    """Raises ValueError, with a message for people, if it is not even the text of a structure. What llguidance makes of
    the grammar is for its compiler to say."""
    match structure.WhichOneof("kind"):
        case "json_schema":
            return _json(structure.json_schema)
        case "json_object":
            if not structure.json_object:
                raise ValueError("must be true, or absent")
            return _json('{"type": "object"}')
        case "regex":
            return str(LLMatcher.grammar_from_regex(structure.regex))
        case "choice":
            return _lark("start: " + " | ".join(map(json.dumps, structure.choice.texts)))
        case "lark":
            return _lark(structure.lark + _FORCES_NOTHING)
    raise ValueError("give one of json_schema, json_object, regex, choice and lark")


def _json(schema: str) -> str:
    # With whitespace allowed small models write newlines until their tokens are spent. A schema that wants it all the
    # same says so in the key x-guidance.
    return str(LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False}))


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})
