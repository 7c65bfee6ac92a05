"""The exact bytes of single tokens: a token may be half a character, which no text can show."""

import json
import re
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer

from gateway.detokenizer import BYTE_OF
from gateway.text import TextModel

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # how tokenizers of sentencepiece's kind write a space


class TokenBytes:
    """Of one tokenizer. Byte-level ones and those with byte fallback are exact; of any other kind the text of the
    single token stands in."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {id: (token.content, token.special) for id, token in tokenizer.get_added_tokens_decoder().items()}
        decoders = _parts(json.loads(tokenizer.decoder.__getstate__())) if tokenizer.decoder else []
        kinds = {each["type"] for each in decoders}
        self._byte_level = "ByteLevel" in kinds
        self._spaced = bool(kinds & {"ByteFallback", "Metaspace", "Replace"})
        self.drops_first_space = any(
            (each["type"] == "Strip" and each.get("start")) or each.get("prepend_scheme", "never") != "never"
            for each in decoders
        )
        self.of = lru_cache(maxsize=16_384)(self._of)
        self.shown = lru_cache(maxsize=16_384)(self._shown)

    def adds(self, token_id: int, *, first: bool = False) -> bytes:
        """The bytes that an output token adds to the text; none, if it is a special one. `first`: of the output."""
        if self._added.get(token_id, ("", False))[1]:
            return b""
        data = self.of(token_id)
        return data.removeprefix(b" ") if first and self.drops_first_space else data

    def named(self, token_id: int, first: bool = False) -> bytes:
        """What names a token: the bytes that it adds, or its own if it adds none."""
        return self.adds(token_id, first=first) or self.of(token_id)

    def _shown(self, token_id: int, first: bool = False) -> tuple[str, list[int]]:
        """A token as JSON has it: its text, or what stands for half a character, and its bytes."""
        data = self.named(token_id, first)
        return data.decode(errors="replace"), list(data)

    def _of(self, token_id: int) -> bytes:
        """The bytes of a token, special or not. Empty if there is no such token."""
        if token_id in self._added:
            return self._added[token_id][0].encode()
        token: str | None = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return bytes(BYTE_OF[character] for character in token if character in BYTE_OF)
        if self._spaced:
            byte = _BYTE.fullmatch(token)
            return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE, " ").encode()
        return str(self._tokenizer.decode([token_id])).encode()


_of_models: WeakKeyDictionary[TextModel, TokenBytes] = WeakKeyDictionary()


def of_model(model: TextModel) -> TokenBytes:
    """Kept for as long as the model is served: cells may serve several."""
    if (kept := _of_models.get(model)) is None:
        kept = _of_models[model] = TokenBytes(model.tokenizer)
    return kept


def _parts(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    return [decoder, *(part for inner in decoder.get("decoders", ()) for part in _parts(inner))]
