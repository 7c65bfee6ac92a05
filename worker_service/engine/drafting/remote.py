"""Chains of guesses that came from a drafter elsewhere, for one request, and which of them fit its text. Pure: no
clock, no link, and nothing that a chain says is believed without its digest."""

from collections.abc import Sequence
from typing import NamedTuple

from worker_service.engine.drafting.prefix import EMPTY, extended

MOST_CHAINS = 128  # of one request, more than an honest drafter has under way; the oldest goes first
MOST_TOKENS = 64  # of a chain; what is beyond is not kept
WINDOW = 64  # positions at the end of the text for which there are digests: an older chain has nothing to say


class Chain(NamedTuple):
    """Guesses at what follows the first `at` tokens of a text, whose digest is `prefix`."""

    at: int
    prefix: int
    tokens: Sequence[int]


class Chains:
    """Those of one request, whose tokens only grow."""

    def __init__(self) -> None:
        self._chains: list[Chain] = []  # the newest one is last
        self._digests = [EMPTY]  # of the first `_first`, `_first` + 1, ... tokens
        self._first = 0

    def add(self, chain: Chain) -> None:
        """It may be late, early, of another text or a lie."""
        self._chains.append(chain._replace(tokens=list(chain.tokens[:MOST_TOKENS])))
        del self._chains[:-MOST_CHAINS]

    def follows(self, chain: Chain, tokens: Sequence[int], at: int) -> bool:
        """Whether it says what comes right behind the first `at` of `tokens`, the whole text. One that guessed the
        outcome of a pass wrongly may begin at the same place, but behind other tokens."""
        self._grow(tokens)
        return chain.at == at >= self._first and self._digests[at - self._first] == chain.prefix

    def longest(self, tokens: Sequence[int]) -> list[int]:
        """What follows `tokens`, the whole text, by the chain that says most; among equals by the newest.

        Its digest is that of the text's first tokens, and what was emitted since is what it guessed. Of those that say
        different things the one from the earliest on counts, and of such the first that came: another is a second
        guess at the outcome of a pass. Chains that can never fit any more are given up.
        """
        self._grow(tokens)
        found = [(chain, self._rest(chain, tokens)) for chain in self._chains]
        self._chains = [chain for chain, rest in found if rest is not None]
        rests = [rest for _, rest in sorted(found, key=lambda each: each[0].at) if rest]
        best = rests[0] if rests else []
        for rest in rests:
            if len(rest) >= len(best) and rest[: len(best)] == best:
                best = rest
        return best

    def _rest(self, chain: Chain, tokens: Sequence[int]) -> list[int] | None:
        """What it guesses behind `tokens`: nothing yet if it follows a longer text. None: it cannot fit any more."""
        if chain.at > len(tokens):
            return []
        passed = len(tokens) - chain.at
        if passed >= len(chain.tokens) or chain.at < self._first:  # first, for it costs nothing: there may be many
            return None
        if self._digests[chain.at - self._first] != chain.prefix or chain.tokens[:passed] != list(tokens[chain.at :]):
            return None
        return list(chain.tokens[passed:])

    def _grow(self, tokens: Sequence[int]) -> None:
        known = self._first + len(self._digests) - 1
        if len(tokens) - known > WINDOW:
            skipped = len(tokens) - WINDOW
            self._digests = [extended(self._digests[-1], tokens[known:skipped])]
            self._first = known = skipped
        for token in tokens[known:]:
            self._digests.append(extended(self._digests[-1], (token,)))
        if (old := len(self._digests) - 1 - WINDOW) > 0:
            del self._digests[:old]
            self._first += old
