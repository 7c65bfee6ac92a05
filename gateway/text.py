"""Text to tokens and back, with the tokenizer and template of the workers' model. Knows neither requests nor RPC."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, NoReturn, TypeAlias

import jinja2
import structlog
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from gateway.detokenizer import Detokenizer, byte_table, special_ids
from protos.link.v1 import common_pb2
from protos.models import digest, unpacked

# What templates know beside what is set here, and what asks for something else than a variable.
_OURS = frozenset({"continue_final_message", "chat_template", "tokenize"})
_END = "\ue000here it goes on\ue000"  # behind the text of a message that goes on: templates may strip spaces


Message: TypeAlias = Mapping[str, Any]  # of a chat


class BadChat(ValueError):
    """Messages that cannot be rendered: there is no chat template, or it refuses them."""


class BadVariables(ValueError):
    """Variables for the chat template that a client may not set."""


class Takes(NamedTuple):
    """What messages a chat template shows."""

    system: bool = True  # one of the system, before the others
    users: bool = True  # two of the user in a row


ALL = Takes()


class TextModel:
    """The tokenizer and the chat template of one model, and what its engine cannot do. Raises ValueError if `info`
    cannot be used.

    A large tokenizer takes a second to load. A thread does not help: the library keeps the interpreter's lock
    meanwhile. It is loaded once for each `info`, before the gateway is ready."""

    def __init__(self, info: common_pb2.ModelInfo) -> None:
        self.info, self.digest = info, digest(info)
        self.name = info.name
        self.fingerprint = info.fingerprint
        self.context_tokens = info.context_tokens
        self.vocab_size = info.vocab_size
        self.eos_ids = list(info.eos_ids)
        self.tokenizer_json = info.tokenizer_json  # compressed by gzip
        self.refused = dict(info.refused)  # fields of a request that its engine cannot serve, and why
        self.caveats = list(info.caveats)
        self._special_tokens = dict(info.special_tokens)
        try:
            self._tokenizer = Tokenizer.from_str(unpacked(info.tokenizer_json))
            for id, token in self._tokenizer.get_added_tokens_decoder().items():
                if id in info.eos_ids and not token.special:  # what ends an answer is no part of its text
                    token.special = True
                    self._tokenizer.add_special_tokens([token])
        except Exception as error:  # the tokenizers library raises bare Exceptions
            raise ValueError(f"model {info.name}: unusable tokenizer: {error}") from error
        self._template: jinja2.Template | None = None
        self._no_template = f"the model {info.name} has no chat template; send a prompt"
        try:
            self._template = _environment().from_string(info.chat_template) if info.chat_template else None
        except Exception as error:  # Jinja makes Python of it, whose errors come through
            self._no_template = f"the chat template of the model {info.name} is broken: {error}; send a prompt"
            structlog.get_logger().warning("chat_template_broken", model=info.name, reason=str(error))
        # A request that does not fit is refused, never cut.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._bytes, self._special = byte_table(self._tokenizer), special_ids(self._tokenizer)
        # The text of one token by itself. Log-probabilities ask for the same ones over and over.
        self.shown = lru_cache(maxsize=16_384)(lambda token_id: self.decode([token_id]))

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @cached_property
    def takes(self) -> Takes:
        """Found out by trying. All, if the template does not even show one message alone: it wants something else."""
        if not self._shows("user"):
            return ALL
        return Takes(system=self._shows("system", "user"), users=self._shows("user", "user"))

    def _shows(self, *roles: str) -> bool:
        messages = [{"role": role, "content": f"message {number}"} for number, role in enumerate(roles)]
        try:
            text = self._render(messages, {}, generation_prompt=True)
        except BadChat:
            return False
        return all(message["content"] in text for message in messages)

    def encode_prompt(self, prompt: str, *, special: bool = True) -> list[int]:
        """Token ids of a raw prompt. `special`: with the special tokens that the tokenizer's post-processing adds."""
        return self._encode(prompt, add_special_tokens=special)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        variables: Mapping[str, Any] | None = None,
        *,
        generation_prompt: bool = True,
        continues: bool = False,
    ) -> list[int]:
        """Token ids up to where the assistant's answer begins. The template writes its own special tokens, so none are
        added. `variables`: further ones for the template. `continues`: up to the end of the last message's text.
        Raises BadChat, BadVariables."""
        if continues:
            *before, last = messages
            messages = [*before, {**last, "content": last["content"] + _END}]
        text = self._render(messages, variables or {}, generation_prompt=generation_prompt)
        if continues:
            text, end, _ = text.rpartition(_END)
            if not end:
                raise BadChat("the model's template does not show the last message as it is, so it cannot go on")
        return self._encode(text, add_special_tokens=False)

    @cached_property
    def _in_parts(self) -> frozenset[str]:
        """Roles whose texts the template shows only where they are lists of parts, as models with vision have them."""
        if not self._wants_parts([], "user", []):
            return frozenset()
        user: list[Message] = [{"role": "user", "content": _parts("hello")}]
        around = {"system": ([], user), "assistant": (user, user)}
        wants = (role for role, (before, behind) in around.items() if self._wants_parts(before, role, behind))
        return frozenset(["user", *wants])

    def _wants_parts(self, before: list[Message], role: str, behind: list[Message]) -> bool:
        said = "\ue000said"  # no template says that itself

        def shows(content: Any) -> bool:
            try:
                messages = [*before, {"role": role, "content": content}, *behind]
                return said in self._filled(messages, {}, generation_prompt=True)
            except BadChat:
                return False

        return not shows(said) and shows(_parts(said))

    def _render(
        self, messages: Sequence[Mapping[str, str]], variables: Mapping[str, Any], *, generation_prompt: bool
    ) -> str:
        """Raises BadChat, BadVariables."""
        roles = self._in_parts
        given = [{**each, "content": _parts(each["content"])} if each["role"] in roles else each for each in messages]
        return self._filled(given, variables, generation_prompt=generation_prompt)

    def _filled(self, messages: Sequence[Message], variables: Mapping[str, Any], *, generation_prompt: bool) -> str:
        """The template with these. Raises BadChat, BadVariables."""
        if self._template is None:
            raise BadChat(self._no_template)
        ours = {"messages": messages, "add_generation_prompt": generation_prompt, "tools": None, "documents": None}
        ours |= self._special_tokens
        if taken := sorted(variables.keys() & (ours.keys() | _OURS | self._template.environment.globals.keys())):
            raise BadVariables(f"the service itself sets {', '.join(taken)}")
        try:
            return self._template.render({**variables, **ours})
        except Exception as error:  # a template is a program: whatever it raises is its refusal
            raise BadChat(f"the model's template refuses the messages: {error}") from error

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # A batch of one: unlike `encode` it releases the interpreter's lock.
        encoding = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        return list(encoding.ids)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """`special`: special tokens are shown, too."""
        # A batch of one, as in `_encode`.
        return str(self._tokenizer.decode_batch([token_ids], skip_special_tokens=not special)[0])

    def detokenizer(self, stop: Sequence[str] = (), min_tokens: int = 0) -> Detokenizer:
        return Detokenizer(self._tokenizer, stop, min_tokens, self._bytes, self._special)


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


class _Generation(Extension):
    """`{% generation %}` marks what trainers learn from; what stands between it and its end is shown like the rest."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_shown"), [], [], body).set_lineno(line)  # a scope of its own, as there

    def _shown(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> jinja2.Environment:
    """Renders chat templates as transformers does (utils/chat_template_utils.py): sandboxed, nothing escaped."""

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(layout: str) -> str:
        return datetime.now().strftime(layout)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
