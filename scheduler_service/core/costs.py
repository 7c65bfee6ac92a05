"""What the parts of a round cost on one worker, as it measured them; and what a round costs then. Decides nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

MOST_SUPPLIED = 64  # positions: no chain of drafts is longer


@dataclass(frozen=True, slots=True)
class CostProfile:
    """Seconds of the parts of a round, as measured by a worker.

    The last six are of drafts that are made elsewhere, while the target verifies; without `chains` they mean nothing.
    """

    draft_s: float = 0.001
    verify_s: float = 0.03
    verify_slope_s: float = 0.003
    prefill_token_s: float = 0.001
    resume_s: float = 0.0  # of a paused request whose KV was kept
    verify_token_s: float = 0.0  # per draft token verified, beside the one token of each request
    offload_block_s: float = 0.0  # per block of KV, to the host's memory and back
    supply_s: float = 0.0  # per position drafted elsewhere
    delay_s: float = 0.0  # until what was verified comes back from there as drafts, beside the time that those take
    hit: float = 1.0  # share of the rounds in which such drafts were there when the round began
    chains: int = 0  # requests that are drafted for elsewhere at a time; 0: none are
    fallback: float = 0.0  # drafts accepted in a round in which they were not there: a lookup may have had some
    wait_s: float = 0.0  # that a round waits for such drafts, in the mean

    def round_s(self, draft_len: int, batch: int) -> float:
        """Nominal seconds of a round of `batch` requests with `draft_len` drafts each, made by the worker itself."""
        drafts = draft_len * (self.draft_s + self.verify_token_s * batch)
        return drafts + self.verify_s + self.verify_slope_s * (batch - 1)

    def step_s(self, draft_lens: Sequence[int], elsewhere: Sequence[bool] = ()) -> float:
        """Nominal seconds of a round of requests with that many drafts each; drafting takes as long as its longest.
        Those drafted `elsewhere` may be waited for instead."""
        here = [n for n, there in zip(draft_lens, elsewhere, strict=True) if not there] if elsewhere else draft_lens
        drafts = max(here, default=0) * self.draft_s + sum(draft_lens) * self.verify_token_s
        if elsewhere and any(n and there for n, there in zip(draft_lens, elsewhere, strict=True)):
            drafts += self.wait_s
        return drafts + self.verify_s + self.verify_slope_s * (len(draft_lens) - 1)

    @property
    def supplied(self) -> int:
        """Positions of one request that are drafted elsewhere while the target makes a pass."""
        return int(min(MOST_SUPPLIED, self.verify_s / self.supply_s)) if self.supply_s > 0 else MOST_SUPPLIED
