"""Stop strings: whether the newest token completes one. Nothing else about a request's end is decided here."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

_REPLACEMENT = "\ufffd"
# Several tokens in a row may each end within a character (emoji, CJK). After this many they are taken for no text.
_INCOMPLETE_TOKENS = 16
_WITHOUT_TEXT = 4  # of those without text so many are kept, no special ones: a later one may show theirs


class StopStrings:
    """Watches one request's output. A stop string may begin and end within tokens."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], output: Iterable[int] = ()) -> None:
        """`tokenizer`: of the tokenizers library. `output`: tokens that exist, whose stop strings do not count."""
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._keep = max(map(len, self._stop), default=1) - 1  # characters of the past that a match may begin in
        self._tail = ""
        self._context: list[int] = []  # the tokens decoded last: at the beginning of a text some decode differently
        self._fresh: list[int] = []
        self._told = 0  # characters of the fresh tokens' text that were told already
        decoder = tokenizer.decoder.__getstate__() if self._stop and tokenizer.decoder else b"{}"
        self._by_bytes = json.loads(decoder).get("type") == "ByteLevel"  # as gateway/detokenizer.py: they must agree
        for token in output:
            self.push(token)

    def push(self, token: int) -> bool:
        """Add a token of output; returns whether it completes a stop string."""
        if not self._stop:
            return False
        new = self._detokenize(token)
        text = self._tail + new
        self._tail = text[max(len(text) - self._keep, 0) :]
        # A match must end in the new text: an earlier one was reported, or did not count.
        return any(text.find(stop, max(len(text) - len(new) - len(stop) + 1, 0)) >= 0 for stop in self._stop)

    def _detokenize(self, token: int) -> str:
        """The text that this token completes. If it ends within a character: without that, by bytes, else empty."""
        decode, context = self._tokenizer.decode, self._context
        self._fresh.append(token)
        shown: str = decode(context)
        text: str = decode(context + self._fresh)
        half, longer = text.endswith(_REPLACEMENT), len(text) > len(shown)
        if not self._by_bytes and (half or not longer) and self._is_nothing(token):
            self._fresh.pop()  # it must not push out, nor part, those that are held
            return ""
        known = len(shown) + self._told
        if half and len(self._fresh) < _INCOMPLETE_TOKENS:
            whole = text.rstrip(_REPLACEMENT)[known:] if self._by_bytes else ""
            self._told += len(whole)
            return whole
        if not self._by_bytes and not longer:  # decoders may tell a space only together with what follows it
            del self._fresh[:-_WITHOUT_TEXT]
            return ""
        whole = text[known:] if self._by_bytes or text.startswith(shown) else decode(self._fresh)
        self._context, self._fresh, self._told = self._fresh, [], 0
        return whole

    def _is_nothing(self, token: int) -> bool:
        """Whether decoding passes over it: it is special, or there is no such token."""
        decode = self._tokenizer.decode
        return decode([token]) != decode([token], skip_special_tokens=False) or not self._tokenizer.id_to_token(token)
