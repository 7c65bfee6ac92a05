"""KV memory of a worker: who keeps it, who gives it back. The worker owns the blocks; it never evicts."""

from collections.abc import Iterable, Sequence

from scheduler_service.core.entry import Entry, Worker


def fit(worker: Worker, rank: Sequence[Entry], by_claim_reversed: Iterable[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Which of `rank` (best first) may run with full KV, and whose KV must be dropped for that.

    Every request that runs keeps 2 * (max_draft + 1) tokens in reserve: a plan is one step old when it is carried out.
    A request resumes only if all of it fits, so that none is evicted halfway (no thrashing); the best one always does,
    since admission refuses what exceeds the whole memory. Paused requests give way from the lowest claim upwards.
    """
    reserve = 2 * (worker.up.max_draft + 1)
    slots = worker.up.slots
    free = worker.free_blocks
    wanted = {
        entry.request.id: max(0, worker.blocks_for(entry.tokens + reserve) - entry.blocks) for entry in rank[:slots]
    }
    drop: list[Entry] = []
    if sum(wanted.values()) > free:
        for entry in by_claim_reversed:
            if entry.blocks and entry.request.id not in wanted:
                drop.append(entry)
                free += entry.blocks
                if sum(wanted.values()) <= free:
                    break
    kept: list[Entry] = []
    for place, entry in enumerate(rank):
        need = wanted.get(entry.request.id, 0)
        if place == 0 or need <= free:
            kept.append(entry)
            free -= need
    return [entry for entry in kept if entry not in drop], drop
