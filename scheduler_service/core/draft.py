"""How many tokens each request drafts in the next round: what makes the whole batch fastest. Nothing is drafted here.

Source: Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput" (SmartSpec,
TurboSpec), arXiv 2406.14066. Departures: lengths differ between the requests of one batch, each by what is believed of
its own acceptance, and they change only when that promises markedly more.
"""

from collections.abc import Sequence

from scheduler_service.core.beliefs import FleetAcceptance
from scheduler_service.core.costs import CostProfile
from scheduler_service.core.entry import Entry

REFERENCE = 4  # drafts a round in which nominal seconds are counted while lengths are chosen
# That is ever chosen; a worker says how many it takes at most. Ours takes 8, for more pay where a pass has a way over a
# network in it, and hardly elsewhere.
LONGEST = 16
INERTIA = 0.03  # other lengths must promise so much more tokens per second
PROBE_ROUNDS = 32  # a request that drafts nothing shows no acceptance: it tries one token as often


def choose_draft_lengths(batch: Sequence[Entry], fleet: FleetAcceptance, cost: CostProfile, longest: int) -> None:
    """For those of the batch that draft in the next round."""
    drafting = [entry for entry in batch if not entry.prefill_owed]
    if drafting:
        chances = [entry.acceptance.chance(fleet.chance) for entry in drafting]
        last = [entry.draft_len for entry in drafting]
        elsewhere = [entry.elsewhere for entry in drafting] if cost.chains else []
        lengths = draft_lengths(chances, last, cost, min(LONGEST, longest), elsewhere)
        for entry, length in zip(drafting, lengths, strict=True):
            entry.draft_len = length


def draft_lengths(
    chances: Sequence[float],
    last: Sequence[int],
    cost: CostProfile,
    longest: int,
    elsewhere: Sequence[bool] = (),
) -> list[int]:
    """For each request of a batch, given the chance that one of its draft tokens is accepted and its last length.
    `elsewhere`: whether its drafts are made there; (): nobody's are.

    Maximises tokens per second, the sum of 1 + p + p^2 + ... + p^length over the seconds of the step, by Dinkelbach's
    method (1967): what earns most when a second is charged at the best rate so far has a better rate, until none has.
    """
    if not any(elsewhere):
        elsewhere = ()
    kept = best = [min(length, longest) for length in last]
    kept_rate = rate = _tokens_per_s(chances, kept, cost, elsewhere)
    while True:
        lengths = _worth(chances, cost, longest, rate, elsewhere)
        better = _tokens_per_s(chances, lengths, cost, elsewhere)
        if better <= rate:
            return best if rate > (1 + INERTIA) * kept_rate else kept
        best, rate = lengths, better


def expected_tokens(chance: float, length: int) -> float:
    """Of a round with `length` drafts, each accepted with this chance after accepted ones."""
    return (1 - chance ** (length + 1)) / (1 - chance) if chance < 1 else length + 1


def _worth(
    chances: Sequence[float], cost: CostProfile, longest: int, rate: float, elsewhere: Sequence[bool]
) -> list[int]:
    """The lengths that earn most if a second costs `rate` tokens.

    Each token must pay for its verification, and those at one position together for the drafting of that position. What
    is further on is less likely, so the first position that does not pay ends the search.
    """
    verified, position = rate * cost.verify_token_s, rate * cost.draft_s
    lengths = [0] * len(chances)
    likely = {i: chance for i, chance in enumerate(chances) if not (elsewhere and elsewhere[i])}
    for length in range(1, longest + 1):
        paying = [i for i, power in likely.items() if power > verified]
        if sum(likely[i] - verified for i in paying) <= position:
            break
        for i in paying:
            lengths[i] = length
        likely = {i: power * chances[i] for i, power in likely.items()}
    if elsewhere:
        _lengthen_elsewhere(lengths, chances, cost, longest, rate, elsewhere)
    return lengths


def _lengthen_elsewhere(
    lengths: list[int],
    chances: Sequence[float],
    cost: CostProfile,
    longest: int,
    rate: float,
    elsewhere: Sequence[bool],
) -> None:
    """The same for drafts made elsewhere. They earn only where they are there in time, nothing is charged for making
    them, and all together must be worth the wait for those that are late."""
    verified = rate * cost.verify_token_s
    likely = {i: cost.hit * chances[i] for i, there in enumerate(elsewhere) if there}
    wanted = dict.fromkeys(likely, 0)
    earned = 0.0
    for length in range(1, min(longest, max(1, cost.supplied)) + 1):
        paying = [i for i, power in likely.items() if power > verified]
        if not paying:
            break
        earned += sum(likely[i] - verified for i in paying)
        wanted.update(dict.fromkeys(paying, length))
        likely = {i: power * chances[i] for i, power in likely.items()}
    if earned > rate * cost.wait_s:
        for i, length in wanted.items():
            lengths[i] = length


def _tokens_per_s(
    chances: Sequence[float], lengths: Sequence[int], cost: CostProfile, elsewhere: Sequence[bool]
) -> float:
    tokens = 0.0
    for i, (chance, length) in enumerate(zip(chances, lengths, strict=True)):
        expected = expected_tokens(chance, length)
        if elsewhere and elsewhere[i] and length:
            expected = cost.hit * expected + (1 - cost.hit) * (1 + cost.fallback)
        tokens += expected
    return tokens / cost.step_s(lengths, elsewhere)
