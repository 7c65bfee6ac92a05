"""The store's twin in memory, for tests and experiments: the same contract, nothing durable. No Redis lives here."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeGuard

from scheduler_service.core.lifecycle import State
from scheduler_service.store.fields import caught_up
from scheduler_service.store.port import Fenced, Index, LostWrites, Pulse, Stored, Unreadable, Verdict, Write


class MemoryStore:
    def __init__(self, keep_s: float = 600.0, clock: Callable[[], float] = time.monotonic) -> None:
        """`keep_s`: how long an ended request can still be asked for. A shallow copy of the store keeps its present
        state: its contents are replaced, never changed."""
        self._epoch = 0
        self._commit: int | None = None
        self._led: tuple[int, str | None] = (0, None)  # the epoch that `lead` gave last, and to which attempt
        self._requests: dict[str, Stored | Unreadable] = {}
        self._ends: dict[str, float] = {}  # when each ended request expires, by `clock`
        self._learned: bytes | None = None
        self._keep_s, self._clock = keep_s, clock

    async def lead(self, now_ms: int, seen: Pulse | None = None, attempt: str | None = None) -> int:
        if attempt is not None and (self._epoch, attempt) == self._led:
            return self._epoch
        if seen is not None and seen != await self.pulse():
            raise Fenced("another leader has taken over")
        self._epoch, self._commit = max(self._epoch + 1, now_ms), 0
        self._led = self._epoch, attempt
        return self._epoch

    async def pulse(self) -> Pulse:
        return Pulse(self._epoch, self._commit)

    async def step_down(self, epoch: int) -> None:
        if epoch == self._epoch:
            self._commit = None

    async def commit(self, epoch: int, number: int, writes: Sequence[Write]) -> list[Verdict]:
        self._fence(epoch)
        again = epoch == self._epoch and number == self._commit
        if not again and (epoch, number - 1) != (self._epoch, self._commit):
            raise LostWrites("earlier commits")
        requests, verdicts = dict(self.requests), []
        for write in writes:
            verdict = _apply(requests, write, again)
            if verdict is None and not again:
                raise LostWrites(f"output of {write.record.request.id}")
            verdicts.append(verdict or Verdict.APPLIED)
        if not again:
            self._keep(requests, writes)
            self._commit = number
        return verdicts

    async def rewrite(
        self, epoch: int, number: int, follows: int, writes: Sequence[Write], before: Pulse | None = None
    ) -> None:
        self._fence(epoch)
        if before is not None and epoch != self._epoch and (await self.pulse()).is_after(before):
            raise Fenced("this store holds writes that the leader has not read")
        last = -1 if self._commit is None else self._commit
        begins = follows >= 0 and (epoch != self._epoch or last <= follows)
        if not begins and (epoch, follows) != (self._epoch, last):
            raise LostWrites("earlier commits")
        requests = dict(self.requests)
        for write in writes:
            requests.pop(write.record.request.id, None)
            _apply(requests, write, again=False)
        self._keep(requests, writes)
        self._epoch, self._commit = epoch, number

    def _keep(self, requests: dict[str, Stored | Unreadable], writes: Sequence[Write]) -> None:
        ends = dict(self._ends)
        for id in {write.record.request.id for write in writes}:
            if requests[id] is not self._requests.get(id):
                ends.pop(id, None)
                if not _live(requests[id]):
                    ends[id] = self._clock() + self._keep_s
        self._requests, self._ends = requests, ends

    async def set_aside(self, epoch: int, id: str, reason: str) -> None:
        self._fence_exactly(epoch)
        if not isinstance(self.requests.get(id), Unreadable):
            self._requests = {**self._requests, id: Unreadable(reason)}
            self._ends = {**self._ends, id: self._clock() + self._keep_s}

    @property
    def requests(self) -> Mapping[str, Stored | Unreadable]:
        """Everything that has not expired."""
        now = self._clock()
        if over := {id for id, at in self._ends.items() if at <= now}:
            self._requests = {id: stored for id, stored in self._requests.items() if id not in over}
            self._ends = {id: at for id, at in self._ends.items() if id not in over}
        return self._requests

    def _fence(self, epoch: int) -> None:
        if self._epoch > epoch:
            raise Fenced("another leader has taken over")

    def _fence_exactly(self, epoch: int) -> None:
        self._fence(epoch)
        if epoch != self._epoch:
            raise LostWrites("earlier commits")

    async def index(self) -> Index:
        live = sorted(
            (stored.record for stored in self.requests.values() if _live(stored)),
            key=lambda record: (record.level, record.key, record.request.id),
        )
        with_kv = [record.request.id for record in live if record.state is not State.WAITING]
        return Index(with_kv, [record.request.id for record in live if record.state is State.WAITING])

    async def read(self, ids: Sequence[str]) -> list[Stored | Unreadable | None]:
        return [self.requests.get(id) for id in ids]

    async def get(self, id: str) -> Stored | Unreadable | None:
        return self.requests.get(id)

    async def save_learned(self, epoch: int, learned: bytes) -> None:
        self._fence_exactly(epoch)
        self._learned = learned

    async def learned(self) -> bytes | None:
        return self._learned

    async def close(self) -> None:
        return


def _live(stored: Stored | Unreadable) -> TypeGuard[Stored]:
    return isinstance(stored, Stored) and stored.ending is None


def _apply(requests: dict[str, Stored | Unreadable], write: Write, again: bool) -> Verdict | None:
    """Returns None, and changes nothing, if the output before this write is not there."""
    record, id = write.record, write.record.request.id
    stored = requests.get(id)
    if isinstance(stored, Unreadable):
        return Verdict.EXISTS
    if stored is None and write.submit is not None:
        stored = Stored(replace(record, emitted=0), write.submit, b"", None, write.model)
    elif stored is not None:
        another = stored.record.request.arrival != record.request.arrival
        if another or (stored.ending is not None and not again):
            return Verdict.EXISTS
    before = record.emitted if write.start is None else write.start
    if stored is None or stored.record.emitted != before:
        return None
    log = stored.log + write.log
    if write.brief:
        record = caught_up(stored.record, log)
    requests[id] = replace(stored, record=record, log=log, ending=write.ending)
    return Verdict.APPLIED
