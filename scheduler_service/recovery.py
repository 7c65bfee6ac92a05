"""Reads back what an earlier leader left in the store: requests with KV at once, the others in the background, or when
somebody asks for them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice

import structlog

from scheduler_service.store import Store, StoreUnavailable, Unreadable
from scheduler_service.unreadable import Found, SetAside, checked

CHUNK = 8  # requests read at once: taking them over holds up everybody else
RETRY_S = 0.25


class Recovery:
    """`take` gets each request as it was found. `known`: whether a request is live here already."""

    def __init__(
        self, store: Store, take: Callable[[str, Found], Awaitable[None]], known: Callable[[str], bool]
    ) -> None:
        self.set_aside = SetAside(store)
        self.unread: dict[str, None] = {}  # ids, the best claim first
        self._store, self._take, self._known = store, take, known
        self._epoch = 0
        self._at_once = CHUNK
        self._doubtful = set[str]()  # unread ones that were asked for in vain
        self._answered = True  # the last read
        self._rolled_back = 0  # times, since the index was read
        self._due = asyncio.Event()
        self._log = structlog.get_logger()

    async def begin(self, epoch: int) -> None:
        """As the leader of this epoch, take over all requests of which a worker may hold KV. Raises StoreUnavailable,
        and then took over none."""
        self._epoch = epoch
        index = await self._store.index()
        with_kv = [(ids, await self._store.read(ids)) for ids in _chunks(index.with_kv)]
        self.unread = dict.fromkeys([*index.with_kv, *index.waiting])
        for ids, read in with_kv:
            await self._taken(ids, read)
            await asyncio.sleep(0)
        self._due.set()

    def again(self) -> None:
        """The store went back in time. Requests that ended since may be live there, and nobody here remembers them."""
        self._rolled_back += 1
        self._due.set()

    async def run(self) -> None:
        """Read the others, and set aside what could not be read, until cancelled. Raises Fenced."""
        trouble = ""
        while True:
            await self._due.wait()
            self._due.clear()
            try:
                if times := self._rolled_back:
                    index = await self._store.index()
                    self.unread |= {id: None for ids in index for id in ids if not self._known(id)}
                    self._rolled_back -= times  # it may go back again while it is asked
                waiting = len(self.unread)
                while self.unread:  # it shrinks meanwhile: requests are also read when somebody asks for them
                    try:
                        await self._fetch_first()
                    except StoreUnavailable:
                        # The store may fail for one request alone, and for ever: others do not wait for that.
                        await self.set_aside.carry_out(self._epoch)
                        raise
                await self.set_aside.carry_out(self._epoch)
                self._log.info("recovered", waiting=waiting)
                trouble = ""
            except StoreUnavailable as error:
                if str(error) != trouble:
                    trouble = str(error)
                    self._log.warning("not_recovered", error=trouble, unread=len(self.unread))
                await asyncio.sleep(RETRY_S)
                self._due.set()

    async def _fetch_first(self) -> None:
        """Those that cannot be read are left out, and fewer asked for at a time, until the store answers for others.
        Who fails again then becomes the last, and keeps nobody waiting; the others keep their places: it was away."""
        if self._doubtful >= self.unread.keys():
            self._doubtful.clear()
        ids = list(islice((id for id in self.unread if self._answered or id not in self._doubtful), self._at_once))
        try:
            await self.fetch(ids)
        except StoreUnavailable:
            failed = {id: None for id in ids if id in self.unread}
            for id in failed.keys() & self._doubtful:
                del self.unread[id]
            self.unread |= failed
            self._doubtful ^= failed.keys()
            self._at_once, self._answered = max(self._at_once // 2, 1), False
            raise
        self._answered = True
        self._at_once = min(2 * self._at_once, CHUNK)

    async def fetch(self, ids: Iterable[str]) -> None:
        """Take over those of `ids` that were not read yet. Raises StoreUnavailable."""
        for wanted in _chunks([id for id in ids if id in self.unread]):
            await self._taken(wanted, await self._store.read(wanted))

    async def _taken(self, ids: list[str], read: list[Found]) -> None:
        for id, found in zip(ids, read, strict=True):
            if id in self.unread:  # else another call has read it meanwhile
                del self.unread[id]
                self._doubtful.discard(id)
                if not self._known(id):
                    found = checked(id, found)
                    if isinstance(found, Unreadable):
                        self.set_aside.found(id, found)
                        self._due.set()
                    await self._take(id, found)


def _chunks(ids: list[str]) -> list[list[str]]:
    return [ids[at : at + CHUNK] for at in range(0, len(ids), CHUNK)]
