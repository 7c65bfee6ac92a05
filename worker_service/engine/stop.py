"""Stop strings: whether the newest token completes one. Nothing else about a request's end is decided here."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

_REPLACEMENT = "\ufffd"
# Several tokens in a row may each end within a character (emoji, CJK). After this many they are taken for no text.
_INCOMPLETE_TOKENS = 16


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
        self._fresh.append(token)
        known = len(self._tokenizer.decode(self._context)) + self._told
        text: str = self._tokenizer.decode(self._context + self._fresh)
        if text.endswith(_REPLACEMENT) and len(self._fresh) < _INCOMPLETE_TOKENS:
            whole = text.rstrip(_REPLACEMENT)[known:] if self._by_bytes else ""
            self._told += len(whole)
            return whole
        if self._by_bytes or len(text) > known or not self._context:  # else the next would decode as at the beginning
            self._context = self._fresh
        self._fresh, self._told = [], 0
        return text[known:]
