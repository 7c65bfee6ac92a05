"""A drafter that cannot harm: what it raises, or answers too little, costs drafts and nothing else. Nothing is drafted
here."""

import logging
from collections.abc import Callable, Sequence
from traceback import extract_tb
from typing import TypeVar

from worker_service.engine.drafting.drafter import Ask, Chain, Drafter, Price, Seen, Verified
from worker_service.engine.types import Elsewhere

_T = TypeVar("_T")
_Proposed = tuple[list[list[int]], list[list[float]], list[list[Chain]]]  # drafts, their chances, other chains
_NOTHING: _Proposed = [], [], []


class Shielded(Drafter):
    """What `drafter` raises is logged, once for each kind of error and without its words, which may be a client's. It
    then forgets the requests that it was asked for. Only a rehearsal may raise: nothing is served yet."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.layers = drafter.layers
        self._told: set[str] = set()

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        self.positions, self.waited_s, self.apart, self.chances, self.others = 0, 0.0, (), (), ()
        drafts, chances, others = _NOTHING
        if asks:
            drafts, chances, others = self._safely(lambda: self._proposed(asks), _NOTHING)
            self.waited_s, self.apart = self._drafter.waited_s, self._drafter.apart
            if len(drafts) == len(asks):
                self.positions = self._drafter.positions
                if list(map(len, chances)) == list(map(len, drafts)):
                    self.chances = chances
                if len(others) == len(asks):
                    self.others = others
            else:
                drafts = []  # whose they are cannot be known
                for ask in asks:
                    self.forget(ask.request_id)
        return drafts or [[] for _ in asks]

    def _proposed(self, asks: Sequence[Ask]) -> _Proposed:
        """The answer of the drafter, with numbers made of what should be numbers. Raises what that raises."""
        drafts = [list(map(int, own)) for own in self._drafter.propose(asks)]
        chances = [list(map(float, own)) for own in self._drafter.chances]
        others = [
            [[(int(token), float(chance)) for token, chance in chain] for chain in own] for own in self._drafter.others
        ]
        return drafts, chances, others

    @property
    def elsewhere(self) -> Elsewhere | None:  # type: ignore[override]  # as it is now
        return self._drafter.elsewhere

    def late(self, asks: Sequence[Ask]) -> dict[str, bool]:
        nobody: dict[str, bool] = {}
        return self._safely(lambda: self._drafter.late(asks), nobody) if asks else nobody

    def expect(self, ask: Ask) -> None:
        self._safely(lambda: self._drafter.expect(ask), None)

    def verified(self, rounds: Sequence[Verified]) -> None:
        self._safely(lambda: self._drafter.verified(rounds), None)

    def read(self, seen: Sequence[Seen]) -> None:
        self._safely(lambda: self._drafter.read(seen), None)

    def price(self, price: Price) -> None:
        self._safely(lambda: self._drafter.price(price), None)

    def rehearse(self, batch: int, draft_len: int) -> None:
        self._drafter.rehearse(batch, draft_len)

    def forget(self, request_id: str) -> None:
        self._safely(lambda: self._drafter.forget(request_id), None)

    def _safely(self, work: Callable[[], _T], otherwise: _T) -> _T:
        try:
            return work()
        except Exception as error:  # whatever it is: the target needs no drafts
            frame = extract_tb(error.__traceback__)[-1]
            where = f"{type(error).__name__} at {frame.filename}:{frame.lineno}"
            if where not in self._told:
                self._told.add(where)
                logging.getLogger(__name__).warning("a drafter failed, and is gone on without: %s", where)
            return otherwise
