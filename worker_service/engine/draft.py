"""Drafters: who proposes tokens for the target to verify. They never see probabilities and cannot change the output."""

from collections.abc import Callable, Sequence
from typing import Protocol


class Drafter(Protocol):
    """The drafter of one request."""

    def propose(self, tokens: Sequence[int], k: int) -> list[int]:
        """At most `k` tokens that may follow `tokens` (prompt and output). Each call extends the last call's tokens."""


class NoDrafter:
    """Plain decoding."""

    def propose(self, tokens: Sequence[int], k: int) -> list[int]:
        return []


class NgramDrafter:
    """Prompt lookup: what followed the most recent earlier occurrence of the longest matching suffix.

    A. Saxena, Prompt Lookup Decoding, 2023. An index of all n-grams makes it O(longest) a token, however long the text.
    """

    def __init__(self, longest: int = 3) -> None:
        self._longest = longest
        self._next: dict[tuple[int, ...], int] = {}  # n-gram -> where its most recent continuation begins
        self._indexed = 0  # n-grams that end before this position are in the index

    def propose(self, tokens: Sequence[int], k: int) -> list[int]:
        if k <= 0:
            return []
        self._index(tokens)
        for n in range(min(self._longest, len(tokens) - 1), 0, -1):
            begin = self._next.get(tuple(tokens[-n:]))
            if begin is not None:
                return self._follow(tokens, begin, k)
        return []

    def _index(self, tokens: Sequence[int]) -> None:
        # The last token is left out: an n-gram that ends there has no continuation yet.
        for end in range(self._indexed + 1, len(tokens)):
            for n in range(1, min(self._longest, end) + 1):
                self._next[tuple(tokens[end - n : end])] = end
            self._indexed = end

    @staticmethod
    def _follow(tokens: Sequence[int], begin: int, k: int) -> list[int]:
        """Copy on from `begin`; past the end, on into the copy: a text that repeats itself goes on repeating."""
        drafts = list(tokens[begin : begin + k])
        period = len(tokens) - begin
        while len(drafts) < k:
            drafts.append(drafts[-period])
        return drafts


DRAFTERS: dict[str, Callable[[], Drafter]] = {"none": NoDrafter, "ngram": NgramDrafter}
