"""The drafts of one step: what a grammar forces, what a drafter proposes, and which of these the target verifies."""

from collections.abc import Sequence
from itertools import takewhile

from worker_service.engine.branches import sprout
from worker_service.engine.drafting.drafter import Chain, Drafter, Price
from worker_service.engine.pass_costs import PassCosts
from worker_service.engine.planning import Work

_CHAINS = 4  # of a request: a fifth one hardly ever pays
_NEAR_SURE = 0.25  # chance that a draft must have to pay, from which second guesses hardly ever do
_FEW = 4  # requests: where more draft, what each takes for likeliest fills the rows that are cheap
_LONG = 1024  # tokens: each chain attends to all of its text anew, which longer ones make as dear as several rows


class Proposals:
    def __init__(self, vocab_size: int, branches: bool) -> None:
        """`vocab_size`: of the target. Drafters and tokenizers may have more ids. `branches`: whether a request may
        have several chains of drafts in a step."""
        self._vocab_size, self._branches = vocab_size, branches
        self.costs: PassCosts | None = None  # None: all that is proposed first is verified

    def draft(self, drafter: Drafter, works: Sequence[Work]) -> None:
        """Give those of `works` that draft their drafts. The drafter is called once, for all of whom no grammar forces
        a token. KV that was reserved for more drafts than there are is given back."""
        drafting = [work for work in works if work.draft_len]
        tokens, rows = sum(work.samples for work in works), sum(len(work.uncomputed) for work in works)
        branching = False
        if self.costs and drafting:
            most = sum(work.draft_len for work in drafting)
            price = Price(*self.costs.price(tokens, rows, most))
            drafter.price(price)
            branching = self._branches and price.least < _NEAR_SURE and len(drafting) <= _FEW
        proposed = self._propose(drafter, drafting, branching)
        if self.costs and drafting:
            chances = [chance for own in proposed for chain in own for _, chance in chain]
            proposed = _likeliest(proposed, self.costs.worth(chances, tokens, rows))
        else:
            proposed = [own[:1] for own in proposed]
        for work, own in zip(drafting, proposed, strict=True):
            longest, *others = sorted([[token for token, _ in chain] for chain in own], key=len, reverse=True) or [[]]
            work.drafts, kv = longest, work.request.kv
            kv.truncate(kv.length - work.draft_len + len(work.drafts))
            sprout(work, others)

    def _propose(self, drafter: Drafter, drafting: Sequence[Work], branching: bool) -> list[list[Chain]]:
        """The chains of each: the drafter's, or what a grammar forces. `branching`: whether there may be several."""
        forced = {work.request.id: self._forced(work) for work in drafting}
        free = [work for work in drafting if not forced[work.request.id]]
        asks = [work.ask._replace(chains=_CHAINS if branching and _forks(work) else 1) for work in free]
        proposed = drafter.propose(asks)
        chances = drafter.chances or [[1.0] * len(own) for own in proposed]
        others = drafter.others or [()] * len(free)
        chains = {id: [own] for id, own in forced.items()}
        for work, ask, own, likely, more in zip(free, asks, proposed, chances, others, strict=True):
            chains[ask.request_id] = self._allowed(work, [list(zip(own, likely, strict=True)), *more])[: ask.chains]
        return [chains[work.request.id] for work in drafting]

    def _forced(self, work: Work) -> Chain:
        matcher = work.request.matcher
        return self._known([(token, 1.0) for token in matcher.forced(work.draft_len)] if matcher else [])

    def _allowed(self, work: Work, proposed: Sequence[Chain]) -> list[Chain]:
        """Those of a work's chains that can be right and are to be verified. Where a grammar forces what follows a
        draft, that is as likely as what it follows."""
        known = [self._known(chain[: work.draft_len]) for chain in proposed]
        if matcher := work.request.matcher:
            own = known[0]
            drafts = matcher.prune([token for token, _ in own], work.draft_len)
            kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1][0], zip(drafts, own, strict=False)))
            likely = [chance for _, chance in own[:kept]]
            return [self._known(list(zip(drafts, likely + (likely[-1:] or [1.0]) * (len(drafts) - kept), strict=True)))]
        firsts = {chain[0][0]: chain for chain in reversed(known) if chain}  # of equal ones the first
        return [chain for chain in known if chain and firsts[chain[0][0]] is chain]

    def _known(self, chain: Chain) -> Chain:
        """Those before the first one that the target does not have."""
        return list(takewhile(lambda draft: 0 <= draft[0] < self._vocab_size, chain))


def _forks(work: Work) -> bool:
    return work.request.matcher is None and len(work.request.tokens) < _LONG


def _likeliest(proposed: Sequence[Sequence[Chain]], count: int) -> list[list[Chain]]:
    """The chains cut down to `count` drafts in all, the likeliest; of equally likely ones those that come earlier."""
    chains = [(i, chain) for i, own in enumerate(proposed) for chain in own]
    places = [(-chance, at, n) for n, (_, chain) in enumerate(chains) for at, (_, chance) in enumerate(chain)]
    kept = [0] * len(chains)
    for _, _, n in sorted(places)[:count]:
        kept[n] += 1
    left: list[list[Chain]] = [[] for _ in proposed]
    for (i, chain), length in zip(chains, kept, strict=True):
        if length:
            left[i].append(chain[:length])
    return left
