"""Writes as a leader makes them, for tests. Nothing is asserted but that a store took them."""

from dataclasses import dataclass, replace

from scheduler_service.core.beliefs import Acceptance
from scheduler_service.core.lifecycle import State
from scheduler_service.core.types import Record
from scheduler_service.store import Store, Stored, Verdict, Write
from scheduler_service.store.rounds import decode, encode
from tests.scheduler.builders import request


def record(id: str = "a", emitted: int = 0, level: int = 1, **changes: object) -> Record:
    fresh = Record(
        request=request(id, 12.5, deadline=99.5, predicted_tokens=7),
        state=State.WAITING,
        placement=3,
        emitted=emitted,
        prefilled=4,
        acceptance=Acceptance(2, 8, 2, 1, (0.5, 0.25)),
        perceptible=True,
        level=level,
        key=1.25,
        preemptions=1,
        started=13.5,
    )
    return replace(fresh, **changes)  # type: ignore[arg-type]


def tokens(id: str, start: int, *ids: int, **changes: object) -> Write:
    return Write(record(id, start + len(ids), **changes), start=start, log=encode(ids, 4, 1))  # type: ignore[arg-type]


@dataclass
class Reign:
    """A leader's commits, numbered as it does."""

    store: Store
    epoch: int
    number: int = 0

    async def commit(self, *writes: Write) -> list[Verdict]:
        self.number += 1
        return await self.again(*writes)

    async def again(self, *writes: Write) -> list[Verdict]:
        return await self.store.commit(self.epoch, self.number, writes)


def submission(id: str) -> Write:
    return Write(record(id), submit=b"payload " + id.encode())


async def created(store: Store, *ids: str) -> Reign:
    reign = Reign(store, await store.lead(1000))
    assert await reign.commit(*map(submission, ids)) == [Verdict.APPLIED] * len(ids)
    return reign


async def live_ids(store: Store) -> list[str]:
    index = await store.index()
    return [*index.with_kv, *index.waiting]


async def output(store: Store, id: str = "a") -> list[int]:
    stored = await store.get(id)
    assert isinstance(stored, Stored)
    tokens = [token for round in decode(stored.log) for token in round.tokens]
    assert len(tokens) == stored.record.emitted
    return tokens
