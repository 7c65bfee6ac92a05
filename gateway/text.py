"""Text to tokens and back, with the tokenizer and template of the workers' model. Knows neither requests nor RPC."""

import asyncio
import gzip
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from protos.link.v1 import common_pb2

TOKENS_AT_ONCE = 64  # made into text in one turn of the event loop
REPLACEMENT = "\ufffd"  # stands for bytes that are no character, or not a whole one yet


class BadChat(ValueError):
    """Messages that cannot be rendered: there is no chat template, or it refuses them."""


class TextModel:
    """The tokenizer and the chat template of one model, and what its engine cannot do. Raises ValueError if `info`
    cannot be used.

    A large tokenizer takes a second to load. A thread does not help: the library keeps the interpreter's lock
    meanwhile. It is loaded once for each `info`, before the gateway is ready."""

    def __init__(self, info: common_pb2.ModelInfo) -> None:
        self.info = info
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
            self._tokenizer = Tokenizer.from_str(gzip.decompress(info.tokenizer_json).decode())
            self._template = _environment().from_string(info.chat_template) if info.chat_template else None
        except Exception as error:  # the tokenizers library raises bare Exceptions
            raise ValueError(f"model {info.name}: unusable tokenizer or chat template: {error}") from error
        # A request that does not fit is refused, never cut.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode_prompt(self, prompt: str) -> list[int]:
        """Token ids of a raw prompt, with the special tokens that the tokenizer's post-processing adds."""
        return self._encode(prompt, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids up to where the assistant's answer begins. The template writes its own special tokens, so none are
        added. Raises BadChat."""
        if self._template is None:
            raise BadChat(f"the model {self.name} has no chat template; send a prompt")
        try:
            text = self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        except Exception as error:  # a template is a program: whatever it raises is its refusal
            raise BadChat(f"the model's template refuses the messages: {error}") from error
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # A batch of one: unlike `encode` it releases the interpreter's lock.
        encoding = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        return list(encoding.ids)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """`special`: special tokens are shown, too."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=not special))

    def detokenizer(self, stop: Sequence[str] = (), min_tokens: int = 0) -> "Detokenizer":
        return Detokenizer(self._tokenizer, stop, min_tokens)


class Detokenizer:
    """Makes text of output tokens as they come. It never shows half a character, nor a stop string and what follows it.
    A stop string that is complete before token number `min_tokens` does not count.

    The library's own DecodeStream raises on bytes that are no UTF-8 (byte fallback), and sampled output may have some.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], min_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._stop = StopCutter(stop)
        self._min_tokens = min_tokens
        self._token_ids: list[int] = []
        self._decoded_chars = 0
        self._context: list[
            int
        ] = []  # the tokens shown last: some tokens decode differently at the beginning of a text
        self._context_chars = 0
        self._fresh: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        # Decoding costs more by the call than by the token, so the tokens of a round are decoded together where no stop
        # string can end between them. Where they end within a character, those before it are shown all the same.
        if len(token_ids) > 1 and not self._stop.strings:
            held = len(self._fresh)
            self._fresh.extend(token_ids)
            if text := self._show():
                self._token_ids.extend(token_ids)
                return text
            del self._fresh[held:]
        return "".join(self._push(token_id) for token_id in token_ids)

    async def push_in_turns(self, token_ids: Sequence[int]) -> str:
        """As `push`. A thousand tokens take ten milliseconds, so the event loop has turns for others in between."""
        text = []
        for start in range(0, len(token_ids), TOKENS_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            text.append(self.push(token_ids[start : start + TOKENS_AT_ONCE]))
        return "".join(text)

    def _push(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        self._fresh.append(token_id)
        return self._stop.push(self._show(), armed=self._armed)

    def _show(self) -> str:
        """What the fresh tokens add to the text, if they end with a whole character."""
        text = self._decode(self._context + self._fresh)
        if len(text) <= self._context_chars or text.endswith(REPLACEMENT):
            return ""  # a special token, or half a character
        text = text[self._context_chars :]
        self._context, self._fresh = self._fresh, []
        self._context_chars = len(self._decode(self._context))
        self._decoded_chars += len(text)
        return text

    def finish(self) -> str:
        """The text withheld so far: half a character (as the replacement character), the beginning of a stop string."""
        text = self._decode(self._token_ids)
        return self._stop.push(text[self._decoded_chars :], armed=self._armed) + self._stop.flush()

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    @property
    def _armed(self) -> bool:
        return len(self._token_ids) >= self._min_tokens


class StopCutter:
    """Cuts a text at the stop string that is complete first; if two end at the same character, at the longer one. It
    withholds an end of the text that may still become a stop string."""

    def __init__(self, stop: Sequence[str]) -> None:
        self.strings = tuple(stop)
        self._withheld = ""
        self._cut = False

    def push(self, text: str, *, armed: bool = True) -> str:
        """The text that may be shown by now. If not `armed`, stop strings that end in `text` do not count."""
        if self._cut:
            return ""
        if not self.strings:
            return text
        old, self._withheld = len(self._withheld), self._withheld + text
        if armed and (match := self._first_match(old)) is not None:
            self._cut = True
            return self._withheld[:match]
        keep = self._longest_beginning()
        shown, self._withheld = (
            self._withheld[: len(self._withheld) - keep],
            self._withheld[len(self._withheld) - keep :],
        )
        return shown

    def flush(self) -> str:
        withheld, self._withheld = self._withheld, ""
        return "" if self._cut else withheld

    def _first_match(self, old: int) -> int | None:
        """Where a stop string begins that ends beyond the first `old` characters: of several, the first to end."""
        matches = []
        for stop in self.strings:
            begin = self._withheld.find(stop, max(0, old - len(stop) + 1))
            if begin >= 0:
                matches.append((begin + len(stop), begin))
        return min(matches)[1] if matches else None

    def _longest_beginning(self) -> int:
        """Length of the longest end of the withheld text with which some stop string begins, but is not whole."""
        longest = max(len(stop) for stop in self.strings) - 1
        for length in range(min(longest, len(self._withheld)), 0, -1):
            if any(len(stop) > length and stop.startswith(self._withheld[-length:]) for stop in self.strings):
                return length
        return 0


def _environment() -> jinja2.Environment:
    """Renders chat templates as transformers does (utils/chat_template_utils.py): sandboxed, nothing escaped."""

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    def strftime_now(layout: str) -> str:
        return datetime.now().strftime(layout)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
