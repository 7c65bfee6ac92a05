"""How many tokens each request drafts in the next round: what makes the whole batch fastest. Nothing is drafted here.

Source: Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput" (SmartSpec,
TurboSpec), arXiv 2406.14066. Departures: lengths differ between the requests of one batch, each by what is believed of
its own acceptance, and they change only when that promises markedly more.
"""

from collections.abc import Sequence

from laps_sd_vllm._core.scheduler_service.core.beliefs import FleetAcceptance
from laps_sd_vllm._core.scheduler_service.core.entry import Entry
from laps_sd_vllm._core.scheduler_service.core.types import CostProfile

REFERENCE = 4  # drafts a round in which nominal seconds are counted while lengths are chosen
LONGEST = 8  # that is ever chosen
INERTIA = 0.03  # other lengths must promise so much more tokens per second
PROBE_ROUNDS = 32  # a request that drafts nothing shows no acceptance: it tries one token as often


def choose_draft_lengths(batch: Sequence[Entry], fleet: FleetAcceptance, cost: CostProfile, longest: int) -> None:
    """For those of the batch that draft in the next round."""
    drafting = [entry for entry in batch if not entry.prefill_owed]
    if drafting:
        chances = [entry.acceptance.chance(fleet.chance) for entry in drafting]
        last = [entry.draft_len for entry in drafting]
        lengths = draft_lengths(chances, last, cost, min(LONGEST, longest))
        for entry, length in zip(drafting, lengths, strict=True):
            entry.draft_len = length


def draft_lengths(chances: Sequence[float], last: Sequence[int], cost: CostProfile, longest: int) -> list[int]:
    """For each request of a batch, given the chance that one of its draft tokens is accepted and its last length.

    Maximises tokens per second, the sum of 1 + p + p^2 + ... + p^length over the seconds of the step, by Dinkelbach's
    method (1967): what earns most when a second is charged at the best rate so far has a better rate, until none has.
    """
    kept = best = [min(length, longest) for length in last]
    kept_rate = rate = _tokens_per_s(chances, kept, cost)
    while True:
        lengths = _worth(chances, cost, longest, rate)
        better = _tokens_per_s(chances, lengths, cost)
        if better <= rate:
            return best if rate > (1 + INERTIA) * kept_rate else kept
        best, rate = lengths, better


def _worth(chances: Sequence[float], cost: CostProfile, longest: int, rate: float) -> list[int]:
    """The lengths that earn most if a second costs `rate` tokens.

    Each token must pay for its verification, and those at one position together for the drafting of that position. What
    is further on is less likely, so the first position that does not pay ends the search.
    """
    verified, position = rate * cost.verify_token_s, rate * cost.draft_s
    lengths, likely = [0] * len(chances), list(chances)
    for length in range(1, longest + 1):
        paying = [i for i, power in enumerate(likely) if power > verified]
        if sum(likely[i] - verified for i in paying) <= position:
            break
        for i in paying:
            lengths[i] = length
        likely = [power * chance for power, chance in zip(likely, chances, strict=True)]
    return lengths


def _tokens_per_s(chances: Sequence[float], lengths: Sequence[int], cost: CostProfile) -> float:
    tokens = 0.0
    for chance, length in zip(chances, lengths, strict=True):
        tokens += (1 - chance ** (length + 1)) / (1 - chance) if chance < 1 else length + 1
    return tokens / cost.step_s(lengths)
