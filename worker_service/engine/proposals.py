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
            cut = self.costs.cut([chance for own in chances for chance in own], tokens, rows)
            for work, own in zip(drafting, chances, strict=True):
                work.drafts = work.drafts[: sum(chance >= cut for chance in own)]
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
        chances = dict(zip([work.request.id for work in free], drafter.chances, strict=False))
        for work, drafts in zip(free, proposed, strict=True):
            work.drafts = self._known(drafts[: work.draft_len])
            if matcher := work.request.matcher:
                work.drafts = self._known(matcher.prune(work.drafts, work.draft_len))
        return [_filled(chances.get(work.request.id, ()), len(work.drafts)) for work in drafting]

    def _known(self, drafts: Sequence[int]) -> list[int]:
        """Those before the first one that the target does not have."""
        return list(takewhile(lambda token: 0 <= token < self._vocab_size, drafts))


def _filled(chances: Sequence[float], count: int) -> list[float]:
    known = list(chances[:count])
    return known + [known[-1] if known else 1.0] * (count - len(known))
