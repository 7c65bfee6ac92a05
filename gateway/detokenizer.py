"""Output tokens to text, as they come: never half a character, nor a stop string. Knows neither requests nor RPC."""

import asyncio
import codecs
import json
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

TOKENS_AT_ONCE = 64  # made into text in one turn of the event loop
REPLACEMENT = "\ufffd"  # stands for bytes that are no character, or not a whole one yet
# Tokens in a row that may be decoded again with each further one: after so many that each end within a character they
# are taken for no text, as by the worker (engine/stop.py). Of those without text so many are kept, no special ones.
_INCOMPLETE_TOKENS = 16
_WITHOUT_TEXT = 4


def _byte_of() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for the characters from 256 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_of()


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special)


class ByteTable(dict[int, bytes]):
    """The bytes that each token of a byte-level tokenizer adds to the text; made as they are asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(dict.fromkeys(special_ids(tokenizer), b""))
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        token: str = self._tokenizer.id_to_token(token_id) or ""
        known = all(character in BYTE_OF for character in token)
        self[token_id] = made = bytes(BYTE_OF[character] for character in token) if known else token.encode()
        return made


def byte_table(tokenizer: Tokenizer) -> ByteTable | None:
    """None: its text is more than the bytes of its tokens in a row."""
    kind = json.loads(tokenizer.decoder.__getstate__())["type"] if tokenizer.decoder else ""
    return ByteTable(tokenizer) if kind == "ByteLevel" else None


class Text(Protocol):
    """The text of a growing output."""

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that the tokens add; the end may be withheld while it is half a character."""

    def rest(self) -> str:
        """The withheld text, half a character as the replacement character."""


class BytesText:
    """By the bytes of each token: a tenth of the time that the library takes."""

    def __init__(self, table: ByteTable) -> None:
        self._bytes_of = table.__getitem__
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._whole = True  # the text ends with a whole character: the decoder withholds nothing

    def add(self, token_ids: Sequence[int]) -> str:
        data = b"".join(map(self._bytes_of, token_ids))
        if self._whole:
            try:
                return data.decode()
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(data)
        self._whole = not self._decoder.getstate()[0]
        return text

    def rest(self) -> str:
        return self._decoder.decode(b"", True)


class LibraryText:
    """For every kind of tokenizer. The library's own DecodeStream raises on bytes that are no UTF-8 (byte fallback),
    and sampled output may have some."""

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int] | None = None) -> None:
        """`special`: the tokenizer's special_ids, if they are known."""
        self._tokenizer = tokenizer
        self._special = special_ids(tokenizer) if special is None else special
        # The tokens shown last, and their text: some tokens decode differently at the beginning of a text.
        self._context: list[int] = []
        self._context_text = ""
        self._fresh: list[int] = []

    def add(self, token_ids: Sequence[int]) -> str:
        # Decoding costs more by the call than by the token, so the tokens of a round are decoded together. Where they
        # end within a character, those before it are shown all the same.
        fresh = [*self._fresh, *token_ids]
        text = self._decode(self._context + fresh)
        half, longer = text.endswith(REPLACEMENT), len(text) > len(self._context_text)
        if half or not longer:
            if len(token_ids) > 1:
                return "".join(self.add([token_id]) for token_id in token_ids)
            if all(map(self._is_nothing, token_ids)):  # then it must not push out, nor part, those that are held
                return ""
        self._fresh = fresh
        if half and len(fresh) < _INCOMPLETE_TOKENS:
            return ""
        if not longer:  # decoders may tell a space only together with what follows it
            del self._fresh[:-_WITHOUT_TEXT]
            return ""
        added = self._added(text)
        self._context, self._fresh = fresh, []
        self._context_text = self._decode(fresh)
        return added

    def _is_nothing(self, token_id: int) -> bool:
        """Whether decoding passes over it."""
        return token_id in self._special or self._tokenizer.id_to_token(token_id) is None

    def _added(self, text: str) -> str:
        """What the fresh tokens add, of the text of these and the context. With byte fallback a run of bytes that turns
        out to be no text has a replacement character for each, those that were shown as characters too."""
        shown = self._context_text
        return text[len(shown) :] if text.startswith(shown) else self._decode(self._fresh)

    def rest(self) -> str:
        return self._added(self._decode(self._context + self._fresh)) if self._fresh else ""

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


class Detokenizer:
    """Makes text of output tokens as they come. It never shows half a character, nor a stop string and what follows it.
    A stop string that is complete before token number `min_tokens` does not count."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        min_tokens: int,
        table: ByteTable | None = None,
        special: frozenset[int] | None = None,
    ) -> None:
        """`table`, `special`: of the tokenizer, if it has one, and if they are known."""
        self._text: Text = LibraryText(tokenizer, special) if table is None else BytesText(table)
        self._stop = StopCutter(stop)
        self._min_tokens = min_tokens
        self._tokens = 0

    def push(self, token_ids: Sequence[int]) -> str:
        if not self._stop.strings:
            return self._text.add(token_ids)
        return "".join(map(self._push, token_ids))  # a stop string may end between them

    async def push_in_turns(self, token_ids: Sequence[int]) -> str:
        """As `push`. A thousand tokens may take ten milliseconds, so the event loop has turns for others in between."""
        text = []
        for start in range(0, len(token_ids), TOKENS_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            text.append(self.push(token_ids[start : start + TOKENS_AT_ONCE]))
        return "".join(text)

    def _push(self, token_id: int) -> str:
        self._tokens += 1
        return self._stop.push(self._text.add([token_id]), armed=self._armed)

    def finish(self) -> str:
        """The text withheld so far: half a character (as the replacement character), the beginning of a stop string."""
        return self._stop.push(self._text.rest(), armed=self._armed) + self._stop.flush()

    @property
    def _armed(self) -> bool:
        return self._tokens >= self._min_tokens


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
        """The begin of a stop string that ends beyond the first `old` characters: of several, the first to end."""
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
