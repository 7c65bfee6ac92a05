"""What a store promises; one contract suite holds every implementation to it."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from scheduler_service.core.types import Record


class StoreUnavailable(Exception):
    """It cannot be reached or cannot write now; the same call may succeed later."""


class Fenced(Exception):
    """Another leader took over: nothing of ours is written any more."""


class Verdict(IntEnum):
    APPLIED = 1
    STALE = 0  # `start` is not where the stored output ends; nothing was written
    EXISTS = 2  # a request of that id is stored already; nothing was written


@dataclass(frozen=True, slots=True)
class Write:
    """One change of one request. A commit repeated whole, since its answer was lost, changes nothing and is APPLIED."""

    record: Record
    submit: bytes | None = None  # with the first write of a request: its payload; the same again has the same arrival
    start: int | None = None  # with tokens: output tokens before them
    log: bytes = b""  # with tokens: their rounds, as rounds.encode
    ending: bytes | None = None  # with the last write: how it ended; the request then expires


@dataclass(frozen=True, slots=True)
class Stored:
    record: Record
    submit: bytes
    log: bytes
    ending: bytes | None


class Store(Protocol):
    """Every method raises StoreUnavailable; what writes, Fenced."""

    async def lead(self, now_ms: int) -> int:
        """Take over: the new epoch, max(stored + 1, now_ms). Earlier leaders are fenced from here on."""

    async def commit(self, epoch: int, writes: Sequence[Write]) -> list[Verdict]:
        """All writes in one atomic step, in order."""

    def live(self) -> AsyncIterator[Stored]:
        """Requests that have not ended, highest queue level first."""

    async def get(self, id: str) -> Stored | None:
        """One request, ended ones included until they expire."""

    async def save_learned(self, epoch: int, learned: bytes) -> None:
        """What the leader has learned, instead of what was kept before."""

    async def learned(self) -> bytes | None:
        """What was last kept; None if nothing was."""

    async def close(self) -> None: ...
