"""What a drafter is: it proposes tokens for the target to verify. Drafters cannot change the output, only its speed."""

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import torch

from worker_service.engine.types import Elsewhere

# Of a head's drafts, until their price is known: from replaying held-out answers with the costs of a small machine.
SURE = 0.3


def hopeful(sure: float) -> float:
    """From which probability of the newest draft and all before it a head makes another one, of which at least `sure`
    is asked: below it that one would likely be for nothing. Below 1 for any price that can be paid."""
    return min(sure / 0.6, (1 + sure) / 2)


class Ask(NamedTuple):
    """What one request asks of its drafter in one round."""

    request_id: str
    tokens: Sequence[int]  # prompt and output: the truth
    draft_len: int  # at most so many drafts, at least one
    salt: str = ""  # what a drafter has computed of a text is shared among requests of equal salt, and no others
    local: bool = False  # its text must not leave this process


class Verified(NamedTuple):
    """What the target made of one request in one pass."""

    request_id: str
    tokens: Sequence[int]  # prompt and output: the truth, with what the pass has added
    hidden: torch.Tensor  # [hidden size]: the target's hidden state when it chose the last of them
    local: bool = False  # as in Ask


class Seen(NamedTuple):
    """What the target knew when it had read verified tokens of one request: those from position `start` on."""

    ask: Ask  # with at least one token more than there are states for
    start: int
    states: torch.Tensor  # [n, hidden size for each of the drafter's layers]


class Drafter(Protocol):
    """Proposes for all requests of a step at once.

    What it remembers of a request is a cache. Steps may pass in which the request is not asked for, and the drafter may
    be told to forget a request that goes on: it then catches up from the tokens, or proposes nothing until it can. A
    request's tokens only grow until then. Of the methods after `propose` a drafter inherits those that it has no use
    for: they do nothing.
    """

    layers: Sequence[int] = ()  # of the target, ascending: `read` is told what enters these (Target.expose)
    waited_s: float = 0.0  # seconds of the last `propose` in which it only waited
    apart: Collection[str] = ()  # the requests whose drafts in the last `propose` another process had made
    elsewhere: Elsewhere | None = None  # of one whose drafts another process makes: what they cost

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        """For each ask the tokens that may follow; none is an answer."""

    def late(self, asks: Sequence[Ask]) -> dict[str, bool]:
        """The requests among these that another process drafts for and whose drafts are not here; True: they are due
        within a pass. It does not wait."""
        return {}

    def expect(self, ask: Ask) -> None:
        """A request has come, which will ask for drafts once its tokens are computed. `draft_len` is 0."""
        return

    def verified(self, rounds: Sequence[Verified]) -> None:
        """A pass is over: the requests that have new tokens and go on. Called once for each pass, also with none."""
        return

    def read(self, seen: Sequence[Seen]) -> None:
        """After each step, if it has `layers`: what the step has computed of all requests that go on."""
        return

    def price(self, least: float) -> None:
        """From now on a draft is worth its verification only if it, together with all drafts before it, is right with a
        probability of at least `least`; above 1 none is. Takes the place of what a drafter was made with."""
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
        self.layers = next((drafter.layers for drafter in drafters if drafter.layers), ())  # one has any, at most

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        self.waited_s, self.apart = 0.0, []
        drafts: dict[str, list[int]] = {ask.request_id: [] for ask in asks}
        for drafter in self._drafters:
            without = [ask for ask in asks if not drafts[ask.request_id]]
            if without:
                drafts |= zip([ask.request_id for ask in without], drafter.propose(without), strict=True)
                self.waited_s += drafter.waited_s
                self.apart += drafter.apart
        return list(drafts.values())

    @property
    def elsewhere(self) -> Elsewhere | None:  # type: ignore[override]  # as it is now
        return next((drafter.elsewhere for drafter in self._drafters if drafter.elsewhere), None)

    def late(self, asks: Sequence[Ask]) -> dict[str, bool]:
        return {id: due for drafter in self._drafters for id, due in drafter.late(asks).items()}

    def expect(self, ask: Ask) -> None:
        for drafter in self._drafters:
            drafter.expect(ask)

    def verified(self, rounds: Sequence[Verified]) -> None:
        for drafter in self._drafters:
            drafter.verified(rounds)

    def read(self, seen: Sequence[Seen]) -> None:
        for drafter in self._drafters:
            drafter.read(seen)

    def price(self, least: float) -> None:
        for drafter in self._drafters:
            drafter.price(least)

    def rehearse(self, batch: int, draft_len: int) -> None:
        for drafter in self._drafters:
            drafter.rehearse(batch, draft_len)

    def forget(self, request_id: str) -> None:
        for drafter in self._drafters:
            drafter.forget(request_id)
