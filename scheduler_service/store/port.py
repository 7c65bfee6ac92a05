"""What a store promises to the scheduler, and the data that goes in and out. One contract suite
(tests/scheduler/store) holds every implementation to it. No implementation lives here."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from typing import NamedTuple, Protocol

from scheduler_service.core.types import Record
from scheduler_service.core.value import value


class StoreUnavailable(Exception):
    """The store did not answer, or cannot do it now. Whether a write happened is unknown; the same call may succeed
    later."""

    answered = False  # whether the server said so that is to be written to; else another leader may have found it


class LostWrites(StoreUnavailable):
    """The store came back without something that it had acknowledged. It accepts no commit until `rewrite` has given
    it everything again."""


class StoreFull(StoreUnavailable):
    """The store has no memory left. It wrote nothing. Until there is memory again it still reads, lets a leader take
    over and takes commits without writes."""


class StoreBusy(StoreUnavailable):
    """The store said that it cannot do it now: it runs a long script, or cannot write its disk."""

    answered = True


class StoreRefuses(StoreUnavailable):
    """The store refused for a reason that waiting does not mend: a password, a permission, a key of the wrong type, a
    script that fails. A person has to mend it; then the same call succeeds."""

    answered = True


class WrongType(StoreRefuses):
    """A key that the store needs as a whole holds something else. No leader can begin before a person has removed
    it."""


class TooFewReplicas(StoreRefuses):
    """Not as many replicas as were asked for have the commit. It may be written, but does not count before they have.
    Nobody but a person may be able to bring them back."""

    answered = False  # so does a primary that is cut off itself


class Fenced(Exception):
    """Another leader took over. Nothing that this leader writes is accepted any more."""


class Verdict(IntEnum):
    """What became of one write of a commit."""

    APPLIED = 1
    EXISTS = 2  # nothing was written: another request has that id, or this request has ended


@value
class Write:
    """One change of one request, or (for `rewrite`) all of it. Two writes are of the same request if both id and
    arrival are equal.

    `brief` says that nothing of the record has changed since the last write that was not brief, except output,
    acceptance and key, and these only by the rounds written since. `record` is then that of the write before. The store
    writes the output alone: it tells acceptance too. The stored key stays.
    """

    record: Record
    submit: bytes | None = None  # with the first write of a request: the payload as it was submitted
    start: int | None = None  # with new tokens: how many output tokens there were before them
    log: bytes = b""  # with new tokens: their rounds, as rounds.encode makes them
    ending: bytes | None = None  # with the last write: how the request ended. The store then lets it expire
    brief: bool = False
    tokens: int = 0  # of output; with a brief write
    model: str = ""  # with the first write: fingerprint of the model that the request runs on; "": not known

    @property
    def emitted(self) -> int:
        """Output tokens after this write."""
        return self.start + self.tokens if self.brief and self.start is not None else self.record.emitted


@dataclass(frozen=True, slots=True)
class Stored:
    """A request as the store holds it."""

    record: Record
    submit: bytes
    log: bytes
    ending: bytes | None  # None: the request is live
    model: str = ""  # fingerprint of the model that it runs on; "": written before fingerprints were stored


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A stored request that this code cannot read: a needed field is missing or malformed, the log does not match, or
    newer code wrote it. It never runs again. The reason is for the log and for its client."""

    reason: str


class Index(NamedTuple):
    """Ids of the live requests."""

    with_kv: list[str]  # a worker may hold KV of these, as far as was written
    waiting: list[str]  # the others, highest queue level first


class Pulse(NamedTuple):
    """Shows that a leader lives: it commits something every persister.BEAT_S."""

    epoch: int  # 0: nobody ever led
    commit: int | None  # number of the leader's last commit; None: it has stepped down
    touched: int = 0  # how often a leader has asked again whether replicas have its last commit

    def is_after(self, other: "Pulse") -> bool:
        """Whether what the store holds by this pulse is more than it held by the other one."""
        return (self.epoch, inf if self.commit is None else self.commit) > (
            other.epoch,
            inf if other.commit is None else other.commit,
        )


class Store(Protocol):
    """Every method raises StoreUnavailable. Every method that writes raises Fenced."""

    async def lead(self, now_ms: int, seen: Pulse | None = None, attempt: str | None = None) -> int:
        """Take over. Returns the new epoch, max(stored + 1, now_ms); earlier leaders are fenced from now on. Raises
        Fenced and changes nothing if `seen` is given and is no longer the pulse.

        A call whose answer was lost is repeated under its `attempt`, a name that no other call has. It changes nothing
        more, and returns the same epoch, unless another leader has taken over since."""

    async def pulse(self) -> Pulse: ...

    async def step_down(self, epoch: int) -> None:
        """A standby that waits may lead at once. Does nothing if another leader has taken over."""

    async def commit(self, epoch: int, number: int, writes: Sequence[Write]) -> list[Verdict]:
        """All writes in one atomic step, in order. A leader numbers its commits from 1. A commit whose answer was lost
        is repeated under its number, and written once. Raises LostWrites if an earlier commit, or the output before
        that of a write, is not in the store."""

    async def rewrite(
        self, epoch: int, number: int, follows: int, writes: Sequence[Write], before: Pulse | None = None
    ) -> None:
        """Whole requests, in place of whatever is stored under their ids. What was lost is rewritten in parts. The
        first part follows the last commit that was acknowledged, each other part the part before it. The last part has
        the number of that commit, so that commits go on; each other part has a number of its own, below -1. Raises
        LostWrites if the part does not follow what is stored: then it arrived late, after other writes.

        `before`: the pulse when this leader took over. Raises Fenced if the store has never seen this leader and holds
        more than that: it is another server than the one that was read, and has writes that the leader has not read."""

    async def index(self) -> Index: ...

    async def read(self, ids: Sequence[str]) -> list[Stored | Unreadable | None]:
        """Each of these requests, ended ones included until they expire. None: there is none of that id."""

    async def get(self, id: str) -> Stored | Unreadable | None:
        """One request, as `read` gives it."""

    async def set_aside(self, epoch: int, id: str, reason: str) -> None:
        """Keep what is stored of an unreadable request apart, for a person to look at. From now on the request has
        ended: `index` does not name it, and `read` says Unreadable with this reason for as long as it would give an
        ended request. Raises LostWrites if this leader's epoch is not in the store."""

    async def save_learned(self, epoch: int, learned: bytes) -> None:
        """Replaces what an earlier call saved. Raises LostWrites as `set_aside` does."""

    async def learned(self) -> bytes | None:
        """What was saved last; None if nothing was."""

    async def close(self) -> None: ...
