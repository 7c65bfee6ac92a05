"""Live requests as the store has them, and who follows them: what became durable is relayed. It plans nothing."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from protos.errors import DuplicateRequest, Lost, NotServing, RequestError, UnknownRequest
from protos.idempotence import content
from protos.v1 import gateway_link_pb2 as pb
from scheduler_service.core.types import Record
from scheduler_service.outbox import GatewayOutbox
from scheduler_service.store import Store, Stored, StoreUnavailable, Unreadable, Verdict, Write
from scheduler_service.store.rounds import LoggedRound, decode
from scheduler_service.unreadable import checked, lost

ENDED_KEPT_S = 10.0  # longer than a store that syncs every second can lose
MAX_ENDED = 4096
AT_ONCE = 32  # writes told of before others get a turn


@dataclass(slots=True)
class Tracked:
    """A live request. `record` and `log` are what is durable; `written`, the last record handed to the
    store, and `output` run ahead of them."""

    submit: pb.Submit
    record: Record
    written: Record = field(init=False)
    output: list[int] = field(default_factory=list)
    log: bytearray = field(default_factory=bytearray)
    stored: bool = False
    model: str = ""  # as in store.Write
    followers: set[GatewayOutbox] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.written = self.record

    def whole(self, ending: bytes | None = None) -> Write:
        """All that is durable of it."""
        submit, log = content(self.submit), bytes(self.log)
        return Write(self.record, submit=submit, start=0, log=log, ending=ending, model=self.model)


class Ledger:
    """`drop` is told of requests that turn out not to be ours to run."""

    def __init__(self, store: Store, clock: Callable[[], float], drop: Callable[[str], None]) -> None:
        self.live: dict[str, Tracked] = {}
        self._store, self._clock, self._drop_from_core = store, clock, drop
        # Follows of requests that are still to be read: offset, who asks, tokens at most.
        self._early: dict[str, list[tuple[int, GatewayOutbox, int]]] = {}
        self._ended: deque[tuple[float, Write]] = deque(maxlen=MAX_ENDED)
        self._log = structlog.get_logger()

    def adopt(self, stored: Stored) -> None:
        """A live request that an earlier leader left."""
        submit = pb.Submit.FromString(stored.submit)
        output = [token for round in decode(stored.log) for token in round.tokens]
        self.live[submit.request_id] = Tracked(
            submit, stored.record, output, bytearray(stored.log), stored=True, model=stored.model
        )

    # ---- who follows ----

    def join(self, id: str, outbox: GatewayOutbox) -> None:
        """What comes of a live request goes to this gateway too."""
        tracked = self.live[id]
        tracked.followers.add(outbox)
        outbox.follows.add(id)

    def leave(self, outbox: GatewayOutbox) -> None:
        for id in outbox.follows:
            if id in self.live:
                self.live[id].followers.discard(outbox)
        for early in self._early.values():
            early[:] = [one for one in early if one[1] is not outbox]

    async def follow(self, id: str, offset: int, outbox: GatewayOutbox, most: int = 0) -> None:
        """Everything durable from the offset on, round by round; then what comes. Where that is more than `most` tokens
        it ends there: the gateway follows again when it has room. Raises StoreUnavailable."""
        try:
            self._follow_read(id, offset, outbox, most, None if id in self.live else await self.stored(id))
        except Lost as error:
            outbox.refuse(id, error)

    def follow_later(self, id: str, offset: int, outbox: GatewayOutbox, most: int = 0) -> None:
        """As `follow`, once it was read: many follow at once when a leader takes over, and none holds up the others."""
        self._early.setdefault(id, []).append((offset, outbox, most))

    def was_read(self, id: str, found: Stored | Unreadable | None) -> None:
        """Whoever followed it early is answered."""
        for offset, outbox, most in self._early.pop(id, ()):
            if isinstance(found, Unreadable):
                outbox.refuse(id, lost(id, found))
            else:
                self._follow_read(id, offset, outbox, most, found)

    def _follow_read(self, id: str, offset: int, outbox: GatewayOutbox, most: int, stored: Stored | None) -> None:
        if id in self.live:
            if _replay(id, self.live[id].log, offset, outbox, most):
                self.join(id, outbox)
        elif stored is None:
            outbox.refuse(id, _unknown(id))
        elif stored.ending is None:  # it became live while we looked
            outbox.refuse(id, NotServing(f"request {id} is being taken over", retry_after_ms=100))
        else:
            _replay_ended(id, stored, offset, outbox, most)

    async def submission(self, id: str) -> pb.Submit:
        """As it was submitted, but for its deadline. Raises UnknownRequest, Lost, StoreUnavailable."""
        if id in self.live and self.live[id].stored:  # else it may turn out that another request has that id
            return self.live[id].submit
        if (stored := await self.stored(id)) is None:
            raise _unknown(id)
        return pb.Submit.FromString(stored.submit)

    async def stored(self, id: str) -> Stored | None:
        """As the store has it; one that ended just now, as the store will have it again if it has lost it since. Raises
        StoreUnavailable; Lost if it cannot be read."""
        found = checked(id, await self._store.get(id))
        if isinstance(found, Unreadable):
            raise lost(id, found)
        if found is not None:
            return found
        ended = (write for _, write in reversed(self._ended) if write.record.request.id == id)
        return next((Stored(write.record, write.submit or b"", write.log, write.ending) for write in ended), None)

    # ---- what the store says ----

    async def durable(self, written: Sequence[tuple[Write, Verdict]]) -> None:
        """What is durable may be told. The store answers: what it holds for long enough by now it does not lose."""
        for count, (write, verdict) in enumerate(written, 1):
            if count % AT_ONCE == 0:
                await asyncio.sleep(0)  # a worker waits for its command
            id = write.record.request.id
            tracked = self.live.get(id)
            if tracked is None or tracked.record.request.arrival != write.record.request.arrival:
                continue  # another request of that id was first
            if verdict is Verdict.EXISTS:
                await self._exists(id, tracked)
            else:
                self._relay(id, tracked, write)
        oldest = self._clock() - ENDED_KEPT_S
        while self._ended and self._ended[0][0] < oldest:
            self._ended.popleft()

    def everything(self) -> list[Write]:
        """All that the store has acknowledged and might have lost, each request whole."""
        live = {id: tracked.whole() for id, tracked in self.live.items() if tracked.stored}
        # An id that is live again is the new request's: the store had forgotten the one that ended.
        return [*live.values(), *(write for _, write in self._ended if write.record.request.id not in live)]

    def _relay(self, id: str, tracked: Tracked, write: Write) -> None:
        if write.submit is not None:
            tracked.stored = True
            for outbox in tracked.followers:
                outbox.accepted(id)
        if write.start is not None:
            tracked.log += write.log
            delta = _delta(id, next(decode(write.log)), write.start)
        else:
            delta = pb.Delta(request_id=id, start=tracked.record.emitted)
        tracked.record = write.record
        if write.ending is not None:
            delta.ending.MergeFromString(write.ending)
            del self.live[id]
            self._ended.append((self._clock(), tracked.whole(write.ending)))
        if write.start is not None or write.ending is not None:
            for outbox in tracked.followers:
                outbox.delta(delta)

    async def _exists(self, id: str, tracked: Tracked) -> None:
        """A request of that id ended before this one came. The same one was sent again, since its answer was lost."""
        try:
            stored = await self._store.get(id)
        except StoreUnavailable as error:
            self._withdraw(id, tracked, NotServing(f"the store cannot be reached: {error}", retry_after_ms=1000))
            return
        if isinstance(stored, Unreadable):
            self._withdraw(id, tracked, lost(id, stored))
        elif stored is None or stored.ending is None:
            self._withdraw(id, tracked, NotServing(f"request {id} is just being written", retry_after_ms=100))
        elif stored.submit != content(tracked.submit):
            self._withdraw(id, tracked, DuplicateRequest(f"request_id: {id} was used before"))
        else:
            self._drop(id)
            for outbox in tracked.followers:
                outbox.accepted(id)
                _replay_ended(id, stored, 0, outbox)

    def _withdraw(self, id: str, tracked: Tracked, error: RequestError) -> None:
        self._drop(id)
        for outbox in tracked.followers:
            outbox.refuse(id, error)

    def _drop(self, id: str) -> None:
        del self.live[id]
        self._drop_from_core(id)


def _unknown(id: str) -> UnknownRequest:
    return UnknownRequest(f"request {id} is unknown, or ended too long ago")


def _replay(id: str, log: bytes | bytearray, offset: int, outbox: GatewayOutbox, most: int = 0) -> bool:
    """Whether that is all; not if it has `most` tokens before its end."""
    for round in decode(bytes(log)):
        end = round.start + len(round.tokens)
        if most and round.start >= offset + most:
            return False
        if end > offset:
            outbox.repeat(_delta(id, round, round.start))
    return True


def _replay_ended(id: str, stored: Stored, offset: int, outbox: GatewayOutbox, most: int = 0) -> None:
    if _replay(id, stored.log, offset, outbox, most):
        ending = pb.Ending.FromString(stored.ending or b"")
        outbox.delta(pb.Delta(request_id=id, start=stored.record.emitted, ending=ending))


def _delta(id: str, round: LoggedRound, start: int) -> pb.Delta:
    delta = pb.Delta(request_id=id, start=start, tokens=round.tokens, drafted=round.drafted, accepted=round.accepted)
    if round.logprobs:
        delta.logprobs.MergeFromString(round.logprobs)
    return delta
