"""What a store promises; one contract suite holds every implementation to it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from scheduler_service.core.types import Record


class StoreUnavailable(Exception):
    """It cannot be reached or cannot write now; the same call may succeed later."""


class LostWrites(StoreUnavailable):
    """It came back without what it had acknowledged; nothing more is written until that was rewritten."""


class Fenced(Exception):
    """Another leader took over: nothing of ours is written any more."""


class Verdict(IntEnum):
    APPLIED = 1
    EXISTS = 2  # nothing was written: another request has that id, or it has ended


@dataclass(frozen=True, slots=True)
class Write:
    """One change of one request, or (to be rewritten) all of it. The same request is one of the same id and arrival.

    `brief`: nothing of the record has changed since the last write but output, acceptance and key, and that by this one
    round. What is stored tells the first two, and keeps the key.
    """

    record: Record
    submit: bytes | None = None  # with the first write of a request: its payload
    start: int | None = None  # with tokens: output tokens before them
    log: bytes = b""  # with tokens: their rounds, as rounds.encode
    ending: bytes | None = None  # with the last write: how it ended; the request then expires
    brief: bool = False


@dataclass(frozen=True, slots=True)
class Stored:
    record: Record
    submit: bytes
    log: bytes
    ending: bytes | None


class Index(NamedTuple):
    """Ids of the requests that have not ended."""

    with_kv: list[str]  # on some worker, as far as was written
    waiting: list[str]  # the others, highest queue level first


class Pulse(NamedTuple):
    """What shows that a leader lives: it commits something every persister.BEAT_S."""

    epoch: int  # 0: nobody ever led
    commit: int | None  # number of its last commit; None: it has stepped down


class Store(Protocol):
    """Every method raises StoreUnavailable; what writes, Fenced."""

    async def lead(self, now_ms: int, seen: Pulse | None = None) -> int:
        """Take over: the new epoch, max(stored + 1, now_ms). Earlier leaders are fenced from here on. Raises Fenced,
        and changes nothing, if the pulse is no longer what was `seen`."""

    async def pulse(self) -> Pulse: ...

    async def step_down(self, epoch: int) -> None:
        """Whoever waits for it may lead at once. Of a leader that is fenced: nothing."""

    async def commit(self, epoch: int, number: int, writes: Sequence[Write]) -> list[Verdict]:
        """All writes in one atomic step, in order. A leader numbers its commits from 1; one whose answer was lost is
        repeated under its number, and written once. Raises LostWrites if an earlier commit, or output before that
        of a write, is not there."""

    async def rewrite(self, epoch: int, number: int, follows: int, writes: Sequence[Write]) -> None:
        """Whole requests, in place of whatever is stored of them. What was lost is rewritten in parts: the first
        follows the last commit that was acknowledged, each other one the part before it. The last one's number is that
        of the commit, so that commits go on; each other has one of its own, below -1. Raises LostWrites if it does not
        follow what is there: then it is late, and others came before it."""

    async def index(self) -> Index: ...

    async def read(self, ids: Sequence[str]) -> list[Stored | None]:
        """Each of these requests, ended ones included until they expire."""

    async def get(self, id: str) -> Stored | None:
        """One of them."""

    async def save_learned(self, epoch: int, learned: bytes) -> None:
        """What the leader has learned, instead of what was kept before."""

    async def learned(self) -> bytes | None:
        """What was last kept; None if nothing was."""

    async def close(self) -> None: ...
