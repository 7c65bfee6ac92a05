"""KV memory of a worker: which requests keep theirs, and which give it back. The worker owns the blocks; it evicts none
by itself."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from scheduler_service.core.entry import Entry, Worker

FORESEEN = 0.9  # of the memory: the rest is for answers that get longer than believed
DEAR = 2.0  # rounds of a lone request: KV that is computed again in less time is not worth memory that stands idle


def fit(
    worker: Worker,
    chosen: Sequence[Entry],
    by_claim_reversed: Iterable[Entry],
    *,
    patient: bool = True,
    quarantined: bool = False,
    foresight: bool = False,
) -> tuple[list[Entry], dict[Entry, int]]:
    """Which of `chosen` (best first) may run with full KV, and which requests must give up KV for that: each with the
    blocks that a copy of its KV takes in the host's memory, or 0 where the KV is dropped.

    A request resumes only if all of it fits, so that none is evicted halfway. The best one always fits: a request
    that exceeds the whole memory is not chosen. Requests of a lower claim give way, the lowest first, but only
    those that were worth it: served for WORTH times as long as it took to compute their KV, or as it takes to copy
    it where the host's memory has room. Until then they go on in the place of the request that waits for their
    memory. So no order of claims makes a worker compute or copy the same KV for ever. On a `quarantined` worker the
    suspects wait for none of the other requests, and none runs beside them.

    With `foresight` nobody begins beside others, and nobody of a lower claim after it, where all of them are believed
    to run out of memory before they end: what was begun too early would be dropped, and computed again. Where that
    takes little time (DEAR) foresight does not count.
    """
    patient = patient and not quarantined
    slots = worker.up.slots
    free = worker.free_blocks
    foresight = foresight and not quarantined and not all(entry.blocks for entry in chosen)
    homed: list[Entry] | None = None  # lowest claim first; looked up only when memory is short
    holding: set[Entry] = set()  # KV, or are to begin
    if foresight:
        homed = list(by_claim_reversed)
        holding = {entry for entry in homed if entry.blocks}
        foresight = _is_dear(worker, len(holding) + 1)
    fits = sum([_need(worker, entry) for entry in chosen]) <= free
    if fits and not (foresight and not _lasts(worker, holding.union(chosen))):
        return list(chosen), {}
    kept: list[Entry] = []
    evict: dict[Entry, int] = {}
    reserved = False  # for the best one, which waits: no other request begins
    for place, entry in enumerate(chosen[:slots]):
        if entry in evict or (reserved and not entry.blocks):
            continue
        if foresight and kept and not entry.blocks and not _lasts(worker, {*holding, entry}):
            reserved = True
            continue
        need = _need(worker, entry)
        if need > free:
            if homed is None:
                homed = list(by_claim_reversed)
                if quarantined:
                    homed = [*(other for other in homed if other not in chosen), *reversed(chosen)]
            giving = dict(_giving(worker, homed, evict, patient))
            givers = _givers(giving, homed[: homed.index(entry)], need - free)
            if givers is None and (place or any(other.blocks and other not in giving for other in homed)):
                reserved = reserved or not place
                continue  # it waits for all of its memory rather than take a part
            for giver in givers or ():
                evict[giver] = giving[giver]
                free += giver.blocks
                holding.discard(giver)
        kept.append(entry)
        holding.add(entry)
        free -= need
    if homed is not None and not quarantined:
        giving = dict(_giving(worker, homed, evict, patient=True))
        for entry in reversed(homed):
            need = _need(worker, entry)
            passed = entry in kept or entry in evict or entry in giving or not entry.blocks
            if len(kept) < slots and need <= free and not passed:
                kept.append(entry)
                free -= need
    if chosen and not kept:  # each waits for memory of another
        return fit(worker, chosen, homed or (), patient=False, quarantined=quarantined)
    for entry in chosen[slots:]:  # the worker fills up with them, so they must fit like the others
        need = _need(worker, entry)
        if need <= free and not (entry in kept or entry in evict or (reserved and not entry.blocks)):
            if foresight and not entry.blocks and not _lasts(worker, {*holding, entry}):
                break
            kept.append(entry)
            holding.add(entry)
            free -= need
    return kept, evict


def _need(worker: Worker, entry: Entry) -> int:
    """Blocks that it lacks to run."""
    short = worker.blocks_for(entry) - entry.blocks
    return short if short > 0 else 0


def _is_dear(worker: Worker, requests: int) -> bool:
    """Whether it takes long to compute anew what one of so many requests holds when they fill the memory."""
    cost, tokens = worker.up.cost, worker.up.blocks * worker.up.block_tokens / requests
    return tokens * cost.prefill_token_s > DEAR * cost.verify_s


def _lasts(worker: Worker, entries: Iterable[Entry]) -> bool:
    """Whether the memory is believed to last until these have ended, all of them running: it is fullest just before one
    ends, when those that outlast it have got as many tokens as it."""
    blocks, size = FORESEEN * worker.up.blocks, worker.up.block_tokens
    tokens = 0
    for number, entry in enumerate(sorted(entries, key=lambda entry: -entry.remaining_tokens), 1):
        tokens += entry.tokens
        if (tokens + number * (entry.remaining_tokens + size / 2)) / size > blocks:  # half of a block is never full
            return False
    return True


def _giving(
    worker: Worker, homed: Sequence[Entry], evict: Mapping[Entry, int], patient: bool
) -> Iterator[tuple[Entry, int]]:
    """Which others may give up KV, each with the blocks of the host's memory that a copy takes if all before it do so.

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
