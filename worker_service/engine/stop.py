"""Stop strings: text made token by token, and whether a stop string has just been completed. Nothing else ends here."""

from collections.abc import Iterable, Sequence
from typing import Any

_REPLACEMENT = "\ufffd"
# Several tokens in a row may each end within a character (of emoji, of CJK); after so many it is no text that comes.
_INCOMPLETE_TOKENS = 16


class StopStrings:
    """Watches one request's output, however its tokens cut the strings."""

    def __init__(self, tokenizer: Any, stop: Sequence[str], output: Iterable[int] = ()) -> None:
        """`tokenizer`: of the tokenizers library. `output`: tokens that exist; no stop string in them counts."""
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._keep = max(map(len, self._stop), default=1) - 1  # characters of the past that a match may begin in
        self._tail = ""
        self._context: list[int] = []  # the tokens last decoded: some decode differently at the beginning of a text
        self._fresh: list[int] = []
        for token in output:
            self.push(token)

    def push(self, token: int) -> bool:
        """Add a token of output; returns whether it completes a stop string."""
        if not self._stop:
            return False
        new = self._detokenize(token)
        text = self._tail + new
        self._tail = text[max(len(text) - self._keep, 0) :]
        # A match must end in the new text, or it would be an old one that did not count.
        return any(text.find(stop, max(len(text) - len(new) - len(stop) + 1, 0)) >= 0 for stop in self._stop)

    def _detokenize(self, token: int) -> str:
        """The text that is complete with this token."""
        self._fresh.append(token)
        before = self._tokenizer.decode(self._context)
        text: str = self._tokenizer.decode(self._context + self._fresh)
        if text.endswith(_REPLACEMENT) and len(self._fresh) < _INCOMPLETE_TOKENS:
            return ""
        self._context, self._fresh = self._fresh, []
        return text[len(before) :]
