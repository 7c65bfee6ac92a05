"""The store's twin in memory, for tests and experiments: the same contract, nothing durable."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from scheduler_service.store.port import Fenced, Stored, Verdict, Write


class MemoryStore:
    def __init__(self) -> None:
        self._epoch = 0
        self._requests: dict[str, Stored] = {}
        self._learned: bytes | None = None

    async def lead(self, now_ms: int) -> int:
        self._epoch = max(self._epoch + 1, now_ms)
        return self._epoch

    async def commit(self, epoch: int, writes: Sequence[Write]) -> list[Verdict]:
        if epoch != self._epoch:
            raise Fenced("another leader has taken over")
        return [self._write(write) for write in writes]

    def _write(self, write: Write) -> Verdict:
        id = write.record.request.id
        stored = self._requests.get(id)
        if write.submit is not None:
            if stored is None:
                stored = Stored(replace(write.record, emitted=0), write.submit, b"", None)
            elif (stored.submit, stored.record.request.arrival) != (write.submit, write.record.request.arrival):
                return Verdict.EXISTS
        elif stored is None:
            return Verdict.STALE
        emitted, log, over = stored.record.emitted, stored.log, stored.ending is not None
        if write.start is not None:
            if write.start == emitted and not over:
                emitted, log = write.record.emitted, log + write.log
            elif write.record.emitted > emitted:
                return Verdict.STALE
            elif write.record.emitted < emitted:
                return Verdict.APPLIED
        if over:
            return Verdict.APPLIED
        self._requests[id] = Stored(replace(write.record, emitted=emitted), stored.submit, log, write.ending)
        return Verdict.APPLIED

    async def live(self) -> AsyncIterator[Stored]:
        for stored in sorted(self._requests.values(), key=lambda s: (s.record.level, s.record.key)):
            if stored.ending is None:
                yield stored

    async def get(self, id: str) -> Stored | None:
        return self._requests.get(id)

    async def save_learned(self, epoch: int, learned: bytes) -> None:
        if epoch != self._epoch:
            raise Fenced("another leader has taken over")
        self._learned = learned

    async def learned(self) -> bytes | None:
        return self._learned

    async def close(self) -> None:
        return
