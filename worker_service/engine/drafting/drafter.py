"""What a drafter is: it proposes tokens for the target to verify. Drafters cannot change the output, only its speed."""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from worker_service.engine.types import Elsewhere


class Price(NamedTuple):
    """What drafts must bring, as steps go now. A draft's chance is the probability that it and all drafts before it are
    right."""

    least: float  # chance of a draft that may be worth its verification
    position: float = 0.0  # tokens that all requests would get in the time that one more draft for each of them takes

    def goes_on(self, chances: Iterable[float]) -> bool:
        """Whether a head makes one more draft for each request, where these are the chances of the newest ones. That of
        the next is taken to be 0.6 of it, which is usual, or as much less than it as it is less than 1."""
        likely = (max(0.6 * chance, 2 * chance - 1) for chance in chances)
        return sum(max(0.0, chance - self.least) for chance in likely) > self.position  # what is no number counts as 0


# Of a head's drafts, until their price is known: from replaying held-out answers with the costs of a small machine.
USUAL = Price(0.3)
ALL = Price(0.0, -1.0)  # every draft that is asked for


# Drafts that follow each other, each with the chance that it and all before it are right: it never rises.
Chain = list[tuple[int, float]]


class Ask(NamedTuple):
    """What one request asks of its drafter in one round."""

    request_id: str
    tokens: Sequence[int]  # prompt and output: the truth
    draft_len: int  # at most so many drafts, at least one
    salt: str = ""  # what a drafter has computed of a text is shared among requests of equal salt, and no others
    local: bool = False  # its text must not leave this process
    chains: int = 1  # that may be verified, at most: the proposed one and others


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
    positions: int = 0  # for how many the last `propose` computed drafts, one after the other
    waited_s: float = 0.0  # seconds of the last `propose` in which it only waited
    # For each draft of the last `propose` the chance that it and all before it are right; (): they count as certain.
    chances: Sequence[Sequence[float]] = ()
    # For each ask of the last `propose` other chains than the proposed one. All of them begin with different tokens.
    others: Sequence[Sequence[Chain]] = ()
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

    def price(self, price: Price) -> None:
        """From now on only drafts that may be worth it are wanted. Takes the place of what a drafter was made with."""
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
        self.positions, self.waited_s, self.apart = 0, 0.0, []
        drafts: dict[str, list[int]] = {ask.request_id: [] for ask in asks}
        chances: dict[str, Sequence[float]] = {}
        others: dict[str, Sequence[Chain]] = {}
        for drafter in self._drafters:
            names = [name for name, own in drafts.items() if not own]
            if names:
                proposed = drafter.propose([ask for ask in asks if not drafts[ask.request_id]])
                drafts |= zip(names, proposed, strict=True)
                chances |= zip(names, drafter.chances or [[1.0] * len(own) for own in proposed], strict=True)
                others |= zip(names, drafter.others or [()] * len(names), strict=True)
                self.positions += drafter.positions
                self.waited_s += drafter.waited_s
                self.apart += drafter.apart
        self.chances = [chances[ask.request_id] for ask in asks]
        self.others = [others[ask.request_id] for ask in asks]
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

    def price(self, price: Price) -> None:
        for drafter in self._drafters:
            drafter.price(price)

    def rehearse(self, batch: int, draft_len: int) -> None:
        for drafter in self._drafters:
            drafter.rehearse(batch, draft_len)

    def forget(self, request_id: str) -> None:
        for drafter in self._drafters:
            drafter.forget(request_id)
