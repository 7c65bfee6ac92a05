"""Drafters: who proposes tokens for the target to verify. They never see probabilities and cannot change the output."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch


class Ask(NamedTuple):
    """What one request asks of its drafter in one round."""

    request_id: str
    tokens: Sequence[int]  # prompt and output: the truth
    draft_len: int  # at most so many drafts, at least one
    salt: str = ""  # what a drafter has computed of a text is shared among requests of equal salt, and no others


class Drafter(Protocol):
    """Proposes for all requests of a round at once.

    What it remembers of a request is a cache: rounds may pass without asking it, and it may be told to forget one that
    goes on. It then catches up from the tokens, or proposes nothing until it can.
    """

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        """For each ask the tokens that may follow; none is an answer. Tokens only grow until `forget`."""

    def observe(self, request_id: str, length: int, hidden: torch.Tensor) -> None:
        """What the target knew when it chose the last of the first `length` tokens: its hidden state [hidden size]."""

    def rehearse(self, batch: int, draft_len: int) -> None:
        """Do the work of drafting `draft_len` tokens for `batch` requests, and keep nothing: it is timed at warm-up.

        In a real round much of it may be spared, by a lookup that hits or a drafter that is not sure.
        """

    def forget(self, request_id: str) -> None:
        """Its tokens start anew, or it is gone. Unknown ids are no error."""


class NoDrafter:
    """Plain decoding."""

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        return [[] for _ in asks]

    def observe(self, request_id: str, length: int, hidden: torch.Tensor) -> None:
        pass

    def rehearse(self, batch: int, draft_len: int) -> None:
        pass

    def forget(self, request_id: str) -> None:
        pass


class NgramDrafter:
    """Prompt lookup: what followed the most recent earlier occurrence of the longest matching suffix.

    A. Saxena, Prompt Lookup Decoding, 2023.
    """

    def __init__(self, longest: int = 3, shortest: int = 1, *, cautious: bool = False) -> None:
        """A suffix must match in `shortest` tokens at least; of `longest` and more the most recent counts.

        `cautious`: a match of n tokens earns n drafts, and only one of `longest` as many as are asked for.
        """
        self._longest, self._shortest, self._cautious = longest, shortest, cautious
        self._indexes: dict[str, _NgramIndex] = {}

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        return [self._index(ask.request_id).propose(ask.tokens, ask.draft_len) for ask in asks]

    def observe(self, request_id: str, length: int, hidden: torch.Tensor) -> None:
        pass

    def rehearse(self, batch: int, draft_len: int) -> None:
        pass  # a lookup

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)

    def _index(self, request_id: str) -> "_NgramIndex":
        index = self._indexes.get(request_id)
        if index is None:
            index = self._indexes[request_id] = _NgramIndex(self._longest, self._shortest, self._cautious)
        return index


class _NgramIndex:
    """All n-grams of one request's tokens: O(longest) a token, however long the text."""

    def __init__(self, longest: int, shortest: int, cautious: bool) -> None:
        self._longest, self._shortest, self._cautious = longest, shortest, cautious
        self._next: dict[tuple[int, ...], int] = {}  # n-gram -> where its most recent continuation begins
        self._indexed = 0  # n-grams that end before this position are in the index

    def propose(self, tokens: Sequence[int], k: int) -> list[int]:
        self._extend(tokens)
        for n in range(min(self._longest, len(tokens) - 1), self._shortest - 1, -1):
            begin = self._next.get(tuple(tokens[-n:]))
            if begin is not None:
                return self._follow(tokens, begin, min(k, n) if self._cautious and n < self._longest else k)
        return []

    def _extend(self, tokens: Sequence[int]) -> None:
        # The last token is left out: an n-gram that ends there has no continuation yet.
        for end in range(self._indexed + 1, len(tokens)):
            for n in range(self._shortest, min(self._longest, end) + 1):
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


class FirstOf:
    """For each request the drafts of the first drafter that has any."""

    def __init__(self, *drafters: Drafter) -> None:
        self._drafters = drafters

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        drafts: dict[str, list[int]] = {ask.request_id: [] for ask in asks}
        for drafter in self._drafters:
            without = [ask for ask in asks if not drafts[ask.request_id]]
            if without:
                drafts |= zip([ask.request_id for ask in without], drafter.propose(without), strict=True)
        return list(drafts.values())

    def observe(self, request_id: str, length: int, hidden: torch.Tensor) -> None:
        for drafter in self._drafters:
            drafter.observe(request_id, length, hidden)

    def rehearse(self, batch: int, draft_len: int) -> None:
        for drafter in self._drafters:
            drafter.rehearse(batch, draft_len)

    def forget(self, request_id: str) -> None:
        for drafter in self._drafters:
            drafter.forget(request_id)
