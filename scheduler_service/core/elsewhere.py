"""Whose drafts are made elsewhere, by a drafter that can serve so many requests at a time. Drafts nothing itself.

Those that run next come first, and among them those who gain most tokens a round by it. A request that is drafted for
there keeps its place against one that gains hardly more: the other's text would have to be read there first. Where that
costs more than what remains of a request can earn, or its tenant forbids it, it is not drafted for there at all.
"""

from collections.abc import Callable, Iterator, Sequence

from scheduler_service.core.draft import INERTIA, LONGEST, expected_tokens
from scheduler_service.core.entry import Entry, Worker
from scheduler_service.core.known import Known
from scheduler_service.core.terms import Terms


def grant_chains(
    worker: Worker,
    listed: Sequence[Entry],
    known: Known,
    rounds_left: Callable[[Entry], int],
    terms_of: Callable[[str], Terms],
) -> Iterator[Entry]:
    """Say of each of `listed`, best first, whether its drafts are made elsewhere, and what that hides. Yields those of
    which that has changed: their claims may have, too. `terms_of`: a tenant by its name."""
    cost, slots = worker.up.cost, worker.up.slots
    longest = min(LONGEST, worker.up.max_draft, max(1, cost.supplied))
    worthy: list[tuple[bool, float, int, Entry]] = []
    for place, entry in enumerate(listed if cost.chains else ()):
        if terms_of(entry.request.tenant).local_drafts:
            continue
        tokens = expected_tokens(entry.acceptance.chance(known.acceptance.chance), longest)
        gain = cost.hit * (tokens - 1 - cost.fallback)
        if gain > 0 and (entry.elsewhere or _pays(entry, gain, rounds_left(entry), worker)):
            worthy.append((place >= slots, -gain * (1 + INERTIA if entry.elsewhere else 1), place, entry))
    granted = tuple([entry for *_, entry in sorted(worthy, key=lambda one: one[:3])][: cost.chains])
    before, worker.drafted_elsewhere = worker.drafted_elsewhere, granted
    hidden_s = known.draft_len * known.cost.draft_s - cost.wait_s
    for entry in before:
        if entry not in granted and entry.key and entry.home == worker.up.worker:  # live, and still here
            entry.elsewhere = False
            if entry.hidden_s:
                entry.hidden_s = 0.0
                yield entry
    for entry in granted:
        entry.elsewhere = True
        if entry.hidden_s != hidden_s:
            entry.hidden_s = hidden_s
            yield entry


def _pays(entry: Entry, gain: float, rounds_left: int, worker: Worker) -> bool:
    """Whether the passes that it saves take longer than to read its text there, and to hear of it."""
    cost = worker.up.cost
    saved_s = rounds_left * gain / (1 + gain) * cost.verify_s
    read_s = entry.tokens * cost.prefill_token_s * min(1.0, cost.supply_s / max(cost.verify_s, 1e-9))
    return saved_s > read_s + cost.delay_s
