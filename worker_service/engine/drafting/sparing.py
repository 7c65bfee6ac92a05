"""A drafter of this process that is only asked while what it drafts is worth the time that this takes. Nothing is
drafted here."""

from collections.abc import Sequence

from worker_service.engine.drafting.drafter import ALL, Ask, Drafter, Price, Seen, Verified

_SHARE = 0.2  # of the newest call, in what a call brings
_CHEAPER = 0.8  # of a price at which it did not pay: at such a one it is tried anew


class Sparing(Drafter):
    """A call brings the chances of its drafts, which the drafter tells, each less the least that it must have; it costs
    the time of the positions for which it drafted. Where positions cost nothing, as they do now and then to find out
    what has changed, the drafter is always asked."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.layers = drafter, drafter.layers
        self._price = self._usual = ALL  # what was told last, and what was told last where positions cost something
        self._brings = 1.0  # tokens, in the mean of the last calls
        self._too_dear: Price | None = None  # the price at which it did not pay; None: it pays

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        if self._too_dear and self._price.position > 0:
            if not self._cheaper(self._too_dear):
                self.chances, self.others, self.positions = (), (), 0
                return [[] for _ in asks]
            self._brings = 1.0
        drafts = self._drafter.propose(asks)
        self.chances, self.others = self._drafter.chances, self._drafter.others
        self.positions = self._drafter.positions
        if self.positions:
            self._judge()
        return drafts

    def _judge(self) -> None:
        least, position = self._usual
        others = [[chance for _, chance in chain] for own in self.others for chain in own]
        paying = [[chance - least for chance in own if chance > least] for own in [*self.chances, *others]]
        computed = self.positions
        if self._price.position <= 0:  # where they cost something chains end soon after the last draft that pays
            computed = min(computed, 1 + max(map(len, paying), default=0))
        self._brings += _SHARE * (sum(map(sum, paying)) - position * computed - self._brings)
        self._too_dear = None if self._brings > 0 else self._too_dear or self._usual

    def _cheaper(self, than: Price) -> bool:
        return self._price.least < _CHEAPER * than.least or self._price.position < _CHEAPER * than.position

    def price(self, price: Price) -> None:
        self._price = price
        if price.position > 0:
            self._usual = price
        self._drafter.price(price)

    def verified(self, rounds: Sequence[Verified]) -> None:
        self._drafter.verified(rounds)

    def read(self, seen: Sequence[Seen]) -> None:
        self._drafter.read(seen)

    def rehearse(self, batch: int, draft_len: int) -> None:
        self._drafter.rehearse(batch, draft_len)

    def forget(self, request_id: str) -> None:
        self._drafter.forget(request_id)
