"""KV memory of a worker: who keeps it, who gives it back. The worker owns the blocks; it never evicts."""

from collections.abc import Iterable, Sequence

from scheduler_service.core.entry import Entry, Worker


def fit(
    worker: Worker, rank: Sequence[Entry], by_claim_reversed: Iterable[Entry], *, patient: bool = True
) -> tuple[list[Entry], list[Entry]]:
    """Which of `rank` (best first) may run with full KV, and whose KV must be dropped for that.

    Every request that runs keeps 2 * (max_draft + 1) tokens in reserve: a plan is one step old when it is carried out.
    A request resumes only if all of it fits, so that none is evicted halfway; the best one always does, since admission
    refuses what exceeds the whole memory. Requests of a lower claim give way, the lowest first, but only those that are
    `settled`: served for some times as long as it took to compute their KV. Until then they go on in the place of
    whoever waits for their memory, so that no order of claims makes a worker compute the same prompts for ever.
    """
    reserve = 2 * (worker.up.max_draft + 1)
    slots = worker.up.slots
    free = worker.free_blocks
    holders: list[Entry] | None = None  # lowest claim first; looked up only when memory is short
    kept: list[Entry] = []
    drop: list[Entry] = []
    reserved = False  # for the best one, which waits: nobody else begins
    for place, entry in enumerate(rank[:slots]):
        if entry in drop or (reserved and not entry.blocks):
            continue
        need = _need(worker, entry, reserve)
        if need > free:
            if holders is None:
                holders = [other for other in by_claim_reversed if other.blocks]
            giving = [other for other in holders if other not in drop and (other.settled or not patient)]
            givers = _givers(giving, entry, need - free)
            if givers is None and (place or not all(other.settled for other in holders if patient)):
                reserved = reserved or not place
                continue  # it waits for all of its memory rather than take a part
            drop += givers or ()
            free += sum(giver.blocks for giver in givers or ())
        kept.append(entry)
        free -= need
    for entry in reversed(holders or ()):
        need = _need(worker, entry, reserve)
        if len(kept) < slots and need <= free and not (entry in kept or entry in drop or entry.settled):
            kept.append(entry)
            free -= need
    if rank and not kept:  # each waits for memory of another
        return fit(worker, rank, holders or (), patient=False)
    for entry in rank[slots:]:  # the worker fills up with them, so they must fit like the others
        need = _need(worker, entry, reserve)
        if need <= free and not (entry in kept or entry in drop or (reserved and not entry.blocks)):
            kept.append(entry)
            free -= need
    return kept, drop


def _need(worker: Worker, entry: Entry, reserve: int) -> int:
    """Blocks that it lacks to run."""
    return max(0, min(worker.blocks_for(entry.tokens + reserve), worker.up.blocks) - entry.blocks)


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
