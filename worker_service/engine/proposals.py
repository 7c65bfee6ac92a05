"""The drafts of one step: what a grammar forces, what a drafter proposes, and which of these the target verifies."""

from collections.abc import Sequence
from itertools import takewhile

from worker_service.engine.drafting.drafter import Drafter, Price
from worker_service.engine.pass_costs import PassCosts
from worker_service.engine.planning import Work


class Proposals:
    def __init__(self, vocab_size: int) -> None:
        """`vocab_size`: of the target. Drafters and tokenizers may have more ids."""
        self._vocab_size = vocab_size
        self.costs: PassCosts | None = None  # None: all that is proposed is verified

    def draft(self, drafter: Drafter, works: Sequence[Work]) -> None:
        """Give those of `works` that draft their drafts. The drafter is called once, for all of whom no grammar forces
        a token. KV that was reserved for more drafts than there are is given back."""
        drafting = [work for work in works if work.draft_len]
        tokens, rows = sum(work.samples for work in works), sum(len(work.uncomputed) for work in works)
        if self.costs and drafting:
            most = sum(work.draft_len for work in drafting)
            drafter.price(Price(*self.costs.price(tokens, rows, most)))
        chances = self._propose(drafter, drafting)
        if self.costs and drafting:
            _keep(drafting, chances, self.costs.worth([chance for own in chances for chance in own], tokens, rows))
        for work in drafting:
            kv = work.request.kv
            kv.truncate(kv.length - work.draft_len + len(work.drafts))

    def _propose(self, drafter: Drafter, drafting: Sequence[Work]) -> list[list[float]]:
        """Give each its drafts. Returns their chances: as the drafter has them, and what is forced is as likely as what
        it follows."""
        for work in drafting:
            if matcher := work.request.matcher:
                work.drafts = self._known(matcher.forced(work.draft_len))
        free = [work for work in drafting if not work.drafts]
        proposed = drafter.propose([work.ask for work in free])
        chances = {work.request.id: [1.0] * len(work.drafts) for work in drafting}
        for i, (work, drafts) in enumerate(zip(free, proposed, strict=True)):
            known = work.drafts = self._known(drafts[: work.draft_len])
            if matcher := work.request.matcher:
                work.drafts = self._known(matcher.prune(known, work.draft_len))
            kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(work.drafts, known, strict=False)))
            own = list(drafter.chances[i][:kept]) if drafter.chances else [1.0] * kept
            chances[work.request.id] = own + own[-1:] * (len(work.drafts) - kept)
        return [chances[work.request.id] for work in drafting]

    def _known(self, drafts: Sequence[int]) -> list[int]:
        """Those before the first one that the target does not have."""
        return list(takewhile(lambda token: 0 <= token < self._vocab_size, drafts))


def _keep(drafting: Sequence[Work], chances: Sequence[Sequence[float]], count: int) -> None:
    """Leave so many of all drafts, the likeliest; of equals those that come earlier in their requests."""
    places = [(-chance, at, i) for i, own in enumerate(chances) for at, chance in enumerate(own)]
    kept = [0] * len(drafting)
    for _, _, i in sorted(places)[:count]:
        kept[i] += 1
    for work, own in zip(drafting, kept, strict=True):
        work.drafts = work.drafts[:own]
