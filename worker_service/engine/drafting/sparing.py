"""A drafter that is only asked while what it drafts is worth the time that this takes. Nothing is drafted here."""

from collections.abc import Sequence

from worker_service.engine.drafting.drafter import ALL, Ask, Drafter, Price, Seen, Verified

_SHARE = 0.1  # of the newest call, in what a call brings
_PROBE = 32  # rounds: in one of so many it is asked though that did not pay, for it may again


class Sparing(Drafter):
    """A call brings the chances of its drafts, each less the least that it must have, and takes the time of all
    positions of the longest chain, and of one more."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.layers = drafter, drafter.layers
        self._price = ALL
        self._brings = 1.0  # tokens, in the mean of the last calls
        self._rounds = 0

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        self._rounds += 1
        if self._brings <= 0 and self._rounds % _PROBE:
            self.chances = ()
            return [[] for _ in asks]
        drafts = self._drafter.propose(asks)
        self.chances = self._drafter.chances
        worth = sum(max(chance - self._price.least, 0.0) for own in self.chances for chance in own)
        cost = self._price.position * (1 + max(map(len, drafts), default=0))
        self._brings += _SHARE * (worth - cost - self._brings)
        return drafts

    def price(self, price: Price) -> None:
        self._price = price
        self._drafter.price(price)

    def verified(self, rounds: Sequence[Verified]) -> None:
        self._drafter.verified(rounds)

    def read(self, seen: Sequence[Seen]) -> None:
        self._drafter.read(seen)

    def rehearse(self, batch: int, draft_len: int) -> None:
        self._drafter.rehearse(batch, draft_len)

    def forget(self, request_id: str) -> None:
        self._drafter.forget(request_id)
