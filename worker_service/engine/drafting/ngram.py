"""The drafter that looks up what followed the same tokens earlier in the text. It computes nothing."""

import math
from collections.abc import Sequence

from worker_service.engine.drafting.drafter import Ask, Drafter, Price

# By the tokens that match, the chance that the first draft is right, and that of each further one if those before it
# are: over 207 answers of smollm2-135m. The last line is of as many and more.
_CHANCES = ((0.26, 0.55), (0.53, 0.70), (0.66, 0.74), (0.72, 0.76), (0.76, 0.80), (0.92, 0.93))
_ALL = 1 << 20  # drafts: no round is that long
_FIRST = 16_384  # tokens: of a longer text only so many of the last ones are looked through when it is first seen
_OLDER = 2_000  # tokens before those that a call then looks through, of all its texts together


class NgramDrafter(Drafter):
    """Prompt lookup: what followed the most recent earlier occurrence of the longest matching suffix.

    A. Saxena, Prompt Lookup Decoding, 2023. It has no use for hidden states, and a lookup needs no rehearsal.
    """

    def __init__(self, longest: int = 6, shortest: int = 1, *, least: float = 0.0) -> None:
        """A suffix must match in at least `shortest` tokens; matches of `longest` tokens and of more count alike.

        `least`: the probability of being right, together with all drafts before it, from which a draft is proposed.
        """
        self._longest, self._shortest = longest, shortest
        self._indexes: dict[str, _NgramIndex] = {}
        self.price(Price(least))

    def price(self, price: Price) -> None:
        self._worth = [_worth(price.least, *chances) for chances in _CHANCES]

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        left = _OLDER
        for ask in asks:
            left -= self._index(ask.request_id).extend(ask.tokens, left)
        found = [self._index(ask.request_id).propose(ask.tokens, ask.draft_len, self._worth) for ask in asks]
        self.chances = [_chances(matched, len(drafts)) for matched, drafts in found]
        return [drafts for _, drafts in found]

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)

    def _index(self, request_id: str) -> "_NgramIndex":
        index = self._indexes.get(request_id)
        if index is None:
            index = self._indexes[request_id] = _NgramIndex(self._longest, self._shortest)
        return index


class _NgramIndex:
    """The n-grams of one request's tokens: O(longest) a token, however long the text."""

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest, self._shortest = longest, shortest
        self._next: dict[tuple[int, ...], int] = {}  # n-gram -> where its most recent continuation begins
        self._indexed = 0  # n-grams that end at this position or before are in the index,
        self._older = 0  # but for those that end at this one or before, if they are not there yet

    def propose(self, tokens: Sequence[int], k: int, worth: Sequence[int]) -> tuple[int, list[int]]:
        """How many of the last of `tokens`, which the index knows, match, and at most `k` that may follow; of a match
        of n tokens `worth[n - 1]`."""
        for n in range(min(self._longest, len(tokens) - 1), self._shortest - 1, -1):
            begin = self._next.get(tuple(tokens[-n:]))
            if begin is not None:
                return n, self._follow(tokens, begin, min(k, worth[min(n, len(worth)) - 1]))
        return 1, []

    def extend(self, tokens: Sequence[int], older: int) -> int:
        """Take in what is new of `tokens`, and at most so many of the `older` ones that were left out. Returns how
        many."""
        if (begin := len(tokens) - _FIRST) > self._indexed:
            self._indexed = self._older = begin
        # The last token is left out: an n-gram that ends there has no continuation yet.
        for end in range(self._indexed + 1, len(tokens)):
            self._add(tokens, end)
            self._indexed = end
        rest = max(self._older - older, 0)
        for end in range(self._older, rest, -1):
            self._add(tokens, end)
        taken, self._older = self._older - rest, rest
        return taken

    def _add(self, tokens: Sequence[int], end: int) -> None:
        for n in range(self._shortest, min(self._longest, end) + 1):
            key = tuple(tokens[end - n : end])
            self._next[key] = max(end, self._next.get(key, 0))  # what is older may come later

    @staticmethod
    def _follow(tokens: Sequence[int], begin: int, k: int) -> list[int]:
        """Copy from `begin` on, and past the end of the text on from the copy: what repeats goes on repeating."""
        drafts = list(tokens[begin : begin + k])
        period = len(tokens) - begin
        while len(drafts) < k:
            drafts.append(drafts[-period])
        return drafts


def _chances(matched: int, count: int) -> list[float]:
    """That so many drafts are right, each with all before it."""
    first, further = _CHANCES[min(matched, len(_CHANCES)) - 1]
    return [first * further**i for i in range(count)]


def _worth(least: float, first: float, further: float) -> int:
    """How many drafts are right with a probability of at least `least`."""
    if least <= 0:
        return _ALL
    return 1 + math.floor(math.log(least / first, further)) if first >= least else 0
