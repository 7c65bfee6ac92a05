"""A drafter whose likeliest chain is always wrong and whose second one is right, so that branches are followed."""

from collections.abc import Mapping, Sequence
from random import Random

from worker_service.engine.drafting.drafter import Ask, Drafter


class Forking(Drafter):
    """Knows the texts. Its likeliest chain is wrong from the first token on, its second one right for some tokens."""

    def __init__(self, texts: Mapping[str, Sequence[int]], right: int = 3) -> None:
        self._texts, self._right, self._random = texts, right, Random(1)
        self.chains = 0  # that it was asked for at once, at most

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        drafts = []
        self.chances, self.others = [], []
        for ask in asks:
            self.chains = max(self.chains, ask.chains)
            truth = list(self._texts[ask.request_id][len(ask.tokens) :][: ask.draft_len]) or [5]
            wrong = [(token + 1) % 200 for token in truth]
            right = self._random.randint(1, self._right)
            branch = [*truth[:right], *wrong[right:]]
            drafts.append(wrong)
            self.chances.append([0.5] * len(wrong))
            self.others.append([[(token, 0.4) for token in branch], [((truth[0] + 2) % 200, 0.1)]])
        return drafts
