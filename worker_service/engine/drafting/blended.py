"""A lookup and another drafter of this process, both asked: where they disagree the target verifies what both say."""

from collections.abc import Sequence

from worker_service.engine.drafting.drafter import Ask, Chain, Drafter, FirstOf

_SURE = 0.7  # chance of a lookup's first draft from which the other drafter is not asked
_AGAINST = 0.7  # of the chance that a lookup's draft has, if the other drafter says something else


class Blended(FirstOf):
    """`lookup` must tell chances and no other chains."""

    def __init__(self, lookup: Drafter, drafter: Drafter) -> None:
        super().__init__(lookup, drafter)
        self._lookup, self._drafter = lookup, drafter

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        drafts = self._lookup.propose(asks)
        looked = [_chain(*pair) for pair in zip(drafts, self._lookup.chances, strict=True)]
        chains = [[own] for own in looked]
        unsure = [i for i, own in enumerate(looked) if not own or own[0][1] < _SURE]
        self.positions = 0
        if unsure:
            drafts, other = self._drafter.propose([asks[i] for i in unsure]), self._drafter
            chances = other.chances or [[1.0] * len(own) for own in drafts]
            others = other.others or [()] * len(drafts)
            for i, own, likely, more in zip(unsure, drafts, chances, others, strict=True):
                chains[i] = _blend(looked[i], [_chain(own, likely), *more])
            self.positions = other.positions
        self.others = [own[1:] for own in chains]
        self.chances = [[chance for _, chance in own[0]] for own in chains]
        return [[token for token, _ in own[0]] for own in chains]


def _chain(tokens: Sequence[int], chances: Sequence[float]) -> Chain:
    return list(zip(tokens, chances, strict=True))


def _blend(looked: Chain, chains: Sequence[Chain]) -> list[Chain]:
    """The likeliest first. What both say is likelier than what one says; where one goes on better, its drafts count."""
    chains = [chain for chain in chains if chain and chain[0][1] > 0]
    if not looked or not chains:
        return chains or [looked]
    says, first = looked[0]
    weight = _AGAINST * first
    blended = [_scaled(chain, 1 - weight) for chain in chains if chain[0][0] != says]
    agreeing = [chain for chain in chains if chain[0][0] == says]
    if agreeing:
        both = weight + (1 - weight) * agreeing[0][0][1]
        blended.append(max((_scaled(own, both / own[0][1]) for own in (looked, agreeing[0])), key=_promise))
    else:
        blended.append(_scaled(looked, _AGAINST))
    return sorted(blended, key=lambda own: -own[0][1])


def _scaled(chain: Chain, factor: float) -> Chain:
    return [(token, factor * chance) for token, chance in chain]


def _promise(chain: Chain) -> float:
    """Tokens that it brings, in the mean."""
    return sum(chance for _, chance in chain)
