"""KV memory of a worker: who keeps it, who gives it back. The worker owns the blocks; it never evicts."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from scheduler_service.core.entry import Entry, Worker


def fit(
    worker: Worker,
    rank: Sequence[Entry],
    by_claim_reversed: Iterable[Entry],
    *,
    patient: bool = True,
    apart: bool = False,
) -> tuple[list[Entry], dict[Entry, int]]:
    """Which of `rank` (best first) may run with full KV, and who must give up KV for that: with the blocks that a copy
    of it takes in the host's memory, or 0 where it is dropped.

    A request resumes only if all of it fits, so that none is evicted halfway; the best one always does, since admission
    refuses what exceeds the whole memory. Requests of a lower claim give way, the lowest first, but only those that
    were worth it: served for some times as long as it took to compute their KV, or takes to copy it where the host's
    memory has room. Until then they go on in the place of whoever waits for their memory, so that no order of claims
    makes a worker compute or copy the same KV for ever. Who has the worker to itself (`apart`) waits for none of them,
    and none runs beside it.
    """
    patient = patient and not apart
    slots = worker.up.slots
    free = worker.free_blocks
    homed: list[Entry] | None = None  # lowest claim first; looked up only when memory is short
    kept: list[Entry] = []
    evict: dict[Entry, int] = {}
    reserved = False  # for the best one, which waits: nobody else begins
    for place, entry in enumerate(rank[:slots]):
        if entry in evict or (reserved and not entry.blocks):
            continue
        need = _need(worker, entry)
        if need > free:
            if homed is None:
                homed = list(by_claim_reversed)
                if apart:
                    homed = [*(other for other in homed if other not in rank), *reversed(rank)]
            giving = dict(_giving(worker, homed, evict, patient))
            givers = _givers(giving, homed[: homed.index(entry)], need - free)
            if givers is None and (place or any(other.blocks and other not in giving for other in homed)):
                reserved = reserved or not place
                continue  # it waits for all of its memory rather than take a part
            for giver in givers or ():
                evict[giver] = giving[giver]
                free += giver.blocks
        kept.append(entry)
        free -= need
    if homed is not None and not apart:
        giving = dict(_giving(worker, homed, evict, patient=True))
        for entry in reversed(homed):
            need = _need(worker, entry)
            passed = entry in kept or entry in evict or entry in giving or not entry.blocks
            if len(kept) < slots and need <= free and not passed:
                kept.append(entry)
                free -= need
    if rank and not kept:  # each waits for memory of another
        return fit(worker, rank, homed or (), patient=False, apart=apart)
    for entry in rank[slots:]:  # the worker fills up with them, so they must fit like the others
        need = _need(worker, entry)
        if need <= free and not (entry in kept or entry in evict or (reserved and not entry.blocks)):
            kept.append(entry)
            free -= need
    return kept, evict


def _need(worker: Worker, entry: Entry) -> int:
    """Blocks that it lacks to run."""
    return max(0, worker.blocks_for(entry) - entry.blocks)


def _giving(
    worker: Worker, homed: Sequence[Entry], evict: Mapping[Entry, int], patient: bool
) -> Iterator[tuple[Entry, int]]:
    """Who else may give up KV, and the blocks of the host's memory that a copy of it takes if all before it do so too.

    When that memory is full, KV is dropped. What is there already stays: it was given up for the same reason, and has
    been paid for.
    """
    room = worker.up.host_blocks - sum(entry.offloaded for entry in homed) - sum(evict.values())
    copy_s = worker.up.cost.offload_block_s * worker.up.slots  # the whole batch waits
    for entry in homed:
        if entry.blocks and entry not in evict:
            copy = worker.blocks_for(entry)
            if copy > room:
                copy = 0
            if not patient or entry.worth(copy * copy_s if copy else entry.kv_s):
                room -= copy
                yield entry, copy


def _givers(giving: Container[Entry], below: Iterable[Entry], short: int) -> list[Entry] | None:
    """The fewest of the lowest claims that hold `short` blocks together; None if all do not."""
    givers: list[Entry] = []
    for giver in filter(giving.__contains__, below):
        givers.append(giver)
        short -= giver.blocks
        if short <= 0:
            return givers
    return None
