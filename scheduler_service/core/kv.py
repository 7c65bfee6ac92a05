"""KV memory of a worker: who keeps it, who gives it back. The worker owns the blocks; it never evicts."""

from collections.abc import Iterable, Sequence

from scheduler_service.core.entry import Entry, Worker


def fit(worker: Worker, rank: Sequence[Entry], by_claim_reversed: Iterable[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Which of `rank` (best first) may run with full KV, and whose KV must be dropped for that.

    Every request that runs keeps 2 * (max_draft + 1) tokens in reserve: a plan is one step old when it is carried out.
    A request resumes only if all of it fits, so that none is evicted halfway (no thrashing); the best one always does,
    since admission refuses what exceeds the whole memory. Requests of a lower claim give way, the lowest first.
    """
    reserve = 2 * (worker.up.max_draft + 1)
    slots = worker.up.slots
    free = worker.free_blocks
    holders: list[Entry] | None = None  # lowest claim first; looked up only when memory is short
    kept: list[Entry] = []
    drop: list[Entry] = []
    for place, entry in enumerate(rank[:slots]):
        if entry in drop:
            continue
        wanted = min(worker.blocks_for(entry.tokens + reserve), worker.up.blocks)
        need = max(0, wanted - entry.blocks)
        if need > free:
            if holders is None:
                holders = [other for other in by_claim_reversed if other.blocks]
            givers = _givers(holders, entry, need - free)
            if givers is None and place:
                continue  # it waits for all of its memory rather than take a part
            drop += givers or ()
            free += sum(giver.blocks for giver in givers or ())
            del holders[: len(givers or ())]
        kept.append(entry)
        free -= need
    return [*kept, *(entry for entry in rank[slots:] if entry not in drop)], drop


def _givers(holders: Sequence[Entry], entry: Entry, short: int) -> list[Entry] | None:
    """The fewest of the lowest claims below `entry`'s that hold `short` blocks together; None if all do not."""
    givers: list[Entry] = []
    for holder in holders:
        if holder.key <= entry.key:
            return None
        givers.append(holder)
        short -= holder.blocks
        if short <= 0:
            return givers
    return None
