"""Live requests as the store has them, and the gateways that follow each: what became durable is sent to them.

Nothing is planned here. Whatever goes through many requests, rounds or writes lets other tasks run after some of them;
what gateways ask for takes its part of a turn of the event loop (pace.py), however many gateways ask at once.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, takewhile

from protos.errors import DuplicateRequest, NotServing, RequestError, UnknownRequest
from protos.idempotence import same
from protos.link.v1 import gateway_link_pb2 as pb
from protos.v1 import types_pb2 as types_pb
from scheduler_service.outbox import GatewayOutbox
from scheduler_service.pace import DURABLE, FOLLOW, REPEATED, UNITS, Turns
from scheduler_service.round_log import RoundLog
from scheduler_service.store import Store, Stored, StoreUnavailable, Unreadable, Verdict, Write
from scheduler_service.store.rounds import decode
from scheduler_service.tracked import Tracked
from scheduler_service.unreadable import Found, checked, lost

ENDED_KEPT_S = 10.0  # longer than the time of which a store that syncs every second can lose the writes
AT_ONCE = 32  # requests or rounds handled until other tasks run
MAX_SENT_AGAIN = 256  # requests that were there before and wait for their answers; more are to come again
TOLD_AT_ONCE = 96  # writes, until other tasks run; with fewer, busy workers would report faster than they are told


class Ledger:
    """`drop` is told of requests that turn out not to be ours to run. `turns`: of the event loop."""

    def __init__(self, store: Store, drop: Callable[[str], None], turns: Turns | None = None) -> None:
        self.live: dict[str, Tracked] = {}
        self._store, self._drop_from_core = store, drop
        self.strays: Callable[[], None] = lambda: None  # called when the store may have a live request that is not here
        self._turns = turns or Turns(UNITS)
        self._passed_s = 0.0  # as `orphans` is told: no clock that is set forth or back
        self._orphans: dict[str, float] = {}  # live requests that no gateway wants, and since when; the longest first
        # Follows of requests that recovery is still to read: offset, gateway, most tokens.
        self._early: dict[str, list[tuple[int, GatewayOutbox, int]]] = {}
        self._ended: dict[str, Tracked] = {}  # the one that ended first is the first
        self._sent_again: asyncio.Queue[tuple[str, Tracked]] = asyncio.Queue(MAX_SENT_AGAIN)

    def adopt(self, stored: Stored) -> None:
        """A live request that an earlier leader left."""
        tracked = self.live[id := stored.record.request.id] = _tracked(stored)
        tracked.output += [token for round in decode(stored.log) for token in round.tokens]
        self._orphan(id)

    # ---- who follows ----

    def join(self, id: str, outbox: GatewayOutbox) -> None:
        """From now on the output of a live request goes to this gateway, too."""
        self._join(id, self.live[id], outbox)

    def _join(self, id: str, tracked: Tracked, outbox: GatewayOutbox, *, behind: bool = False) -> None:
        if not outbox.gone:  # it may have gone while its answer was written
            tracked.followers[outbox] = not behind
            outbox.follows.add(id)
            self._orphans.pop(id, None)

    def leave(self, outbox: GatewayOutbox) -> None:
        """This gateway was lost."""
        outbox.gone = True
        for id in outbox.follows:
            if id in self.live:
                self.live[id].followers.pop(outbox, None)
                self._orphan(id)

    def _orphan(self, id: str) -> None:
        """Take note if no gateway wants this request any more, unless its client asked for it to run on."""
        tracked = self.live[id]
        if not tracked.followers and tracked.submit.on_disconnect != types_pb.ON_DISCONNECT_DETACH:
            self._orphans.setdefault(id, self._passed_s)

    def orphans(self, seconds: float, timeout_s: float) -> list[str]:
        """So many seconds have passed. Live requests that no gateway has wanted for `timeout_s`; at most AT_ONCE."""
        self._passed_s += seconds
        due = takewhile(lambda id: self._orphans[id] + timeout_s <= self._passed_s, self._orphans)
        named = list(islice(due, AT_ONCE))
        for id in named:
            del self._orphans[id]
        return named

    async def follow(self, id: str, offset: int, outbox: GatewayOutbox, most: int = 0) -> None:
        """Send everything durable from the offset on, round by round; then join. If there are more than `most` tokens
        it ends there, and the gateway follows again when it has room; 0: no bound. Raises StoreUnavailable if the
        request is not live, and the store has to be asked."""
        await self._turns.room(FOLLOW)
        found = None if self.known(id) else checked(id, await self._store.get(id))
        await self._answer(id, found, offset, outbox, most)

    def follow_later(self, id: str, offset: int, outbox: GatewayOutbox, most: int = 0) -> None:
        """As `follow`, once recovery has read the request. When a leader takes over many follow at once, and none of
        them holds up the others."""
        others = [one for one in self._early.get(id, ()) if not one[1].gone]  # gateways come and go meanwhile
        self._early[id] = [*others, (offset, outbox, most)]

    async def was_read(self, id: str, found: Found) -> None:
        """Recovery has read this request: answer those that followed it early."""
        for offset, outbox, most in self._early.pop(id, ()):
            await self._turns.room(FOLLOW)
            if not outbox.gone:
                await self._answer(id, found, offset, outbox, most)

    async def _answer(self, id: str, found: Found, offset: int, outbox: GatewayOutbox, most: int) -> None:
        """`found`: in the store, if the request was not known here."""
        if (tracked := self.known(id)) is not None:
            await self._replay(id, tracked, offset, outbox, most)
        elif found is None:
            outbox.refuse(id, _unknown(id))
        elif isinstance(found, Unreadable):
            outbox.refuse(id, lost(id, found))
        elif found.ending is None:  # it became live, and ended, while we looked
            outbox.refuse(id, NotServing(f"request {id} is being taken over", retry_after_ms=100))
        else:
            await self._replay(id, _tracked(found), offset, outbox, most)

    def known(self, id: str) -> Tracked | None:
        """A request that is live, or ended just now."""
        return self.live.get(id) or self._ended.get(id)

    async def _replay(self, id: str, tracked: Tracked, offset: int, outbox: GatewayOutbox, most: int) -> None:
        """New rounds wait until the answer is whole, also for other streams of that gateway: in between they would look
        there as if some had been left out."""
        joined, new = tracked.followers.get(outbox, False), tracked.log.tokens
        if joined:
            tracked.followers[outbox] = False
        end = await self._repeat(id, tracked, offset, outbox, most)
        if joined and end < tracked.log.tokens:
            await self._repeat(id, tracked, new, outbox, 0)
        # From the last round to here nothing may wait.
        joined = joined or tracked.followers.get(outbox, False)  # another answer may have become whole meanwhile
        whole = joined or end == tracked.log.tokens
        if tracked.ending is None:
            self._join(id, tracked, outbox, behind=not whole)
        elif whole:
            outbox.ending(id, tracked.record.emitted, tracked.ending)

    async def _repeat(self, id: str, tracked: Tracked, offset: int, outbox: GatewayOutbox, most: int) -> int:
        """The rounds from that offset on, `most` tokens or somewhat more; returns up to which token."""
        end = offset
        for count, round in enumerate(tracked.log.since(offset)):
            if most and end >= offset + most:
                return end
            if count % AT_ONCE == 0:
                await self._turns.room(REPEATED)
            outbox.round(id, round, counted=False)
            end = round.start + len(round.tokens)
        return tracked.log.tokens

    # ---- what is known of a request ----

    async def submission(self, id: str) -> pb.Submit:
        """As it was submitted, without its deadline. Raises UnknownRequest, Lost, StoreUnavailable."""
        if id in self.live and self.live[id].stored:  # else it may turn out that another request has that id
            return self.live[id].submit
        if (stored := await self.stored(id)) is None:
            raise _unknown(id)
        return pb.Submit.FromString(stored.submit)

    async def stored(self, id: str) -> Stored | None:
        """As the store has it. A request that ended just now is known even if the store has lost it. Raises
        StoreUnavailable; Lost if what is stored cannot be read."""
        found = checked(id, await self._store.get(id))
        if isinstance(found, Unreadable):
            raise lost(id, found)
        if found is not None or id not in self._ended:
            return found
        whole = self._ended[id].whole()
        return Stored(whole.record, whole.submit or b"", whole.log, whole.ending)

    def concerns(self, write: Write) -> bool:
        """Whether the request is ours still. If another one of that id was there first it is not."""
        tracked = self.live.get((request := write.record.request).id)
        return tracked is not None and tracked.record.request.arrival == request.arrival

    # ---- what the store says ----

    async def durable(self, written: Iterable[tuple[Write, Verdict]]) -> None:
        """These writes were committed: tell the gateways. The store has answered just now, so what it has held for
        ENDED_KEPT_S it will not lose any more."""
        count = 0
        for count, (write, verdict) in enumerate(written, 1):
            if count % TOLD_AT_ONCE == 0:
                await self._turns.pause(DURABLE)
            if not self.concerns(write):
                continue
            tracked = self.live[id := write.record.request.id]
            if verdict is Verdict.EXISTS:
                self._exists(id, tracked)
            elif write.brief:
                self._relay_rounds(id, tracked, write)
            else:
                self._relay(id, tracked, write)
        self._turns.take(count % TOLD_AT_ONCE * DURABLE // TOLD_AT_ONCE)
        oldest = self._passed_s - ENDED_KEPT_S
        while self._ended and self._ended[first := next(iter(self._ended))].ended_s < oldest:
            del self._ended[first]

    def everything(self) -> Iterator[Write]:
        """All that the store has acknowledged and may have lost, each request whole. To be read to its end before the
        next writes are said to be durable."""
        live = {id: tracked for id, tracked in self.live.items() if tracked.stored}
        # If an id is both, the live one counts: the store had forgotten the one that ended. One that is not stored yet
        # does not count: it is perhaps the ended request, sent again.
        for tracked in (self._ended | live).values():
            yield tracked.whole()

    def _relay(self, id: str, tracked: Tracked, write: Write) -> None:
        if write.submit is not None:
            tracked.stored = True
            for outbox in tracked.followers:
                outbox.accepted(id)
        if write.start is not None:
            self._relay_rounds(id, tracked, write)
        elif write.ending is not None:
            for outbox, joined in tracked.followers.items():
                if joined:
                    outbox.ending(id, write.record.emitted, write.ending)
        tracked.record = write.record
        if write.ending is not None:
            tracked.ending, tracked.ended_s = write.ending, self._passed_s
            tracked.output = []
            self._remove(id, tracked)
            self._ended.pop(id, None)
            self._ended[id] = tracked

    def _relay_rounds(self, id: str, tracked: Tracked, write: Write) -> None:
        at, size = 0, len(write.log)
        while at < size:
            round, encoded = tracked.rounds.pop(0)
            tracked.log.append(round, encoded)
            at += len(encoded)
            for outbox, joined in tracked.followers.items():
                if joined:
                    outbox.round(id, round, write.ending if at == size else None)

    def _exists(self, id: str, tracked: Tracked) -> None:
        """A request of that id was there before this one came. It is looked at beside the commits: neither a store that
        hangs nor long answers hold them up."""
        self._remove(id, tracked)
        self._drop_from_core(id)
        try:
            self._sent_again.put_nowait((id, tracked))
        except asyncio.QueueFull:
            _refuse(id, tracked, NotServing("too many wait for the store", retry_after_ms=1000))

    async def answer_again(self) -> None:
        """Tell those who sent an ended request again, since its answer was lost, until cancelled."""
        while True:
            id, tracked = await self._sent_again.get()
            await self._turns.room(FOLLOW)
            try:
                earlier = await self._earlier(id, tracked.submit)
            except StoreUnavailable as error:
                self.strays()
                _refuse(id, tracked, NotServing(f"the store cannot be reached: {error}", retry_after_ms=1000))
            except RequestError as error:
                _refuse(id, tracked, error)
            else:
                for outbox in tracked.followers:
                    if not outbox.gone:
                        outbox.accepted(id)
                        await self._replay(id, earlier, 0, outbox, most=0)

    async def _earlier(self, id: str, submit: pb.Submit) -> Tracked:
        """The request that had this id, and has ended. Raises StoreUnavailable; Lost; DuplicateRequest if it was
        another one; NotServing if it has not ended."""
        if id in self._ended:
            earlier = self._ended[id]
        elif (stored := await self.stored(id)) is None or stored.ending is None:
            self.strays()  # one that went back has made it live, after the last look for such requests
            raise NotServing(f"request {id} is being taken over", retry_after_ms=100)
        else:
            earlier = _tracked(stored)
        if not same(earlier.submit, submit):
            raise DuplicateRequest(f"request_id: {id} was used before")
        return earlier

    def _remove(self, id: str, tracked: Tracked) -> None:
        """It is live no longer."""
        del self.live[id]
        self._orphans.pop(id, None)
        for outbox in tracked.followers:
            outbox.follows.discard(id)


def _tracked(stored: Stored) -> Tracked:
    submit, log = pb.Submit.FromString(stored.submit), RoundLog(stored.log)
    return Tracked(submit, stored.record, log=log, ending=stored.ending, stored=True, model=stored.model)


def _unknown(id: str) -> UnknownRequest:
    return UnknownRequest(f"request {id} is unknown, or ended too long ago")


def _refuse(id: str, tracked: Tracked, error: RequestError) -> None:
    for outbox in tracked.followers:
        outbox.refuse(id, error)
