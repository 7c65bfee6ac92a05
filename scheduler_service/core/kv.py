"""KV memory of a worker: which requests keep theirs, and which give it back. The worker owns the blocks; it evicts none
by itself."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from scheduler_service.core.entry import Entry, Worker

FORESEEN = 0.9  # of the memory: the rest is for answers that get longer than believed
DEAR = 2.0  # rounds of a lone request: KV that is computed again in less time is not worth memory that stands idle


def fit(
    worker: Worker,
    chosen: Sequence[Entry],
    by_claim_reversed: Iterable[Entry],
    *,
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
    fitting = _Fitting(worker, chosen, by_claim_reversed, quarantined, foresight)
    if fitting.all_fit():
        return list(chosen), {}
    fitting.choose(patient=not quarantined)
    if chosen and not fitting.kept:  # each waits for memory of another
        fitting = _Fitting(worker, chosen, fitting.homed, quarantined, foresight=False)
        fitting.choose(patient=False)
    fitting.add_spares()
    return fitting.kept, fitting.evict


class _Fitting:
    """One attempt of `fit`: who runs (`kept`) and who gives up KV (`evict`), as far as that is decided."""

    def __init__(
        self,
        worker: Worker,
        chosen: Sequence[Entry],
        by_claim_reversed: Iterable[Entry],
        quarantined: bool,
        foresight: bool,
    ) -> None:
        self.kept: list[Entry] = []
        self.evict: dict[Entry, int] = {}
        self._worker, self._slots, self._free = worker, worker.up.slots, worker.free_blocks
        self._chosen, self._by_claim_reversed, self._quarantined = chosen, by_claim_reversed, quarantined
        self._reserved = False  # for the best one, which waits: no other request begins
        self._holding: set[Entry] = set()  # KV, or are to begin; asked for with foresight alone
        self._foresight = foresight and not quarantined and not all(entry.blocks for entry in chosen)
        if self._foresight:
            self._holding = {entry for entry in self.homed if entry.blocks}
            self._foresight = _is_dear(worker, len(self._holding) + 1)

    @cached_property
    def homed(self) -> list[Entry]:
        """This worker's requests in the order in which they give up KV. Listing them takes time: asked for only where
        memory is short, or foresight counts."""
        homed = list(self._by_claim_reversed)
        if self._quarantined:
            return [*(other for other in homed if other not in self._chosen), *reversed(self._chosen)]
        return homed

    def all_fit(self) -> bool:
        """Whether all that are chosen may run, and nobody gives up anything."""
        if sum([need(self._worker, entry) for entry in self._chosen]) > self._free:
            return False
        return not self._foresight or _lasts(self._worker, self._holding.union(self._chosen))

    def choose(self, *, patient: bool) -> None:
        """Those that run in the slots. `patient`: only KV that was worth it is given up."""
        for place, entry in enumerate(self._chosen[: self._slots]):
            if entry in self.evict or not self._may_begin(entry):
                continue
            if self._make_room(entry, best=not place, patient=patient):
                self._keep(entry)
            elif not place:
                self._reserved = True
        if len(self.kept) < self._slots and not self._quarantined:
            self._let_others_go_on()

    def _may_begin(self, entry: Entry) -> bool:
        """True of one that has begun."""
        if entry.blocks:
            return True
        if self.kept and not self._lasts_with(entry):
            self._reserved = True
        return not self._reserved

    def _lasts_with(self, entry: Entry) -> bool:
        return not self._foresight or _lasts(self._worker, {*self._holding, entry})

    def _make_room(self, entry: Entry, *, best: bool, patient: bool) -> bool:
        """Whether there is room for it, if need be since others give way. It waits for all of its memory rather than
        take a part; but the `best` one runs anyway where nobody else keeps any: blocks that several share are in no
        request's count, and become free when the last of these gives them up."""
        short = need(self._worker, entry) - self._free
        if short <= 0:
            return True
        giving = dict(_giving(self._worker, self.homed, self.evict, patient))
        givers = _givers(giving, self.homed[: self.homed.index(entry)], short)
        if givers is None and (not best or any(other.blocks and other not in giving for other in self.homed)):
            return False
        for giver in [other for other in giving if other is not entry] if givers is None else givers:
            self.evict[giver] = giving[giver]
            self._free += giver.blocks
            self._holding.discard(giver)
        return True

    def _keep(self, entry: Entry) -> None:
        self.kept.append(entry)
        self._holding.add(entry)
        self._free -= need(self._worker, entry)

    def _let_others_go_on(self) -> None:
        """In the slots that are left run those whose KV was not worth it yet."""
        giving = dict(_giving(self._worker, self.homed, self.evict, patient=True))
        for entry in reversed(self.homed):
            passed = entry in self.kept or entry in self.evict or entry in giving or not entry.blocks
            if len(self.kept) < self._slots and not passed and need(self._worker, entry) <= self._free:
                self._keep(entry)

    def add_spares(self) -> None:
        """The worker fills its slots up with them, so they must fit like the others."""
        for entry in self._chosen[self._slots :]:
            waits = self._reserved and not entry.blocks
            if waits or entry in self.kept or entry in self.evict or need(self._worker, entry) > self._free:
                continue
            if not entry.blocks and not self._lasts_with(entry):
                break
            self._keep(entry)


def need(worker: Worker, entry: Entry) -> int:
    """Blocks that it lacks to run at home. KV that is computed is there, in blocks of its own or in shared ones. The
    last token of the output has none yet."""
    tokens = entry.tokens - entry.prefill_owed - (entry.emitted > 0)
    computed = 0 if entry.offloaded else -(-tokens // worker.up.block_tokens)
    short = worker.blocks_for(entry) - max(entry.blocks, computed)
    return short if short > 0 else 0


def may_begin(worker: Worker, others: Sequence[Entry], entry: Entry) -> bool:
    """Whether foresight lets it begin here beside these. Alone it may in any case."""
    if not others:
        return True
    holding = sum([other.blocks > 0 for other in others])
    return not _is_dear(worker, holding + 1) or _lasts(worker, [*others, entry])


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
