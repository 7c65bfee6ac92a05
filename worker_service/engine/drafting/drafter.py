"""What a drafter is: it proposes tokens for the target to verify. Drafters cannot change the output, only its speed."""

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
    """Proposes for all requests of a step at once.

    What it remembers of a request is a cache. Steps may pass in which the request is not asked for, and the drafter may
    be told to forget a request that goes on: it then catches up from the tokens, or proposes nothing until it can. A
    drafter that needs none of the last three methods inherits them: they do nothing.
    """

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        """For each ask the tokens that may follow; none is an answer. A request's tokens only grow until `forget`."""

    def observe(self, request_id: str, length: int, hidden: torch.Tensor) -> None:
        """What the target knew when it chose the last of the first `length` tokens: its hidden state [hidden size]."""
        return

    def rehearse(self, batch: int, draft_len: int) -> None:
        """Do the work of drafting `draft_len` tokens for `batch` requests, and keep nothing: it is timed at warm-up.

        In a real step a drafter may spare itself much of it: a lookup finds something, or the drafter is not sure.
        """
        return

    def forget(self, request_id: str) -> None:
        """The request's tokens start anew, or it is gone. Unknown ids are no error."""
        return


class NoDrafter(Drafter):
    """Plain decoding."""

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        return [[] for _ in asks]


class FirstOf(Drafter):
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
