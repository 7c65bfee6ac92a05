"""The cells of a service, and which of them has a request, or gets a new one. Each has a link of its own (link.py);
with one cell all of this is that link.

An id that this service draws begins with the name of its cell, so any gateway knows where it is. Any other id belongs
to the cell that rendezvous hashing gives it: the same at every gateway that has read the same file.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from itertools import dropwhile
from random import Random
from typing import TypeVar

import structlog
from structlog.contextvars import bound_contextvars

from gateway.cell_file import Cell, CellList
from gateway.config import RETRY_AFTER_MS
from gateway.link import Link
from gateway.rendezvous import homes_of, weight
from gateway.several import in_cell
from gateway.text import TextModel
from protos.bounds import MOST_LISTED, PAGE
from protos.errors import BadInput, NotServing, RequestError, UnknownModel, UnknownRequest
from protos.v1 import inference_pb2, types_pb2

Reply = TypeVar("Reply")
LOOK_S = 1.0  # between two looks at the file
SEPARATOR = "-"  # behind the name of a cell, in an id
# Told from ids that clients choose by what comes behind the name: `order-17` does not name a cell `order`.
_DRAWN = re.compile(rf"([a-z0-9]+){SEPARATOR}[0-9a-f]{{32}}(-\d+)?")
ONLY = ""  # the name of the cell of a service that has no file
CHOICES = 2  # the power of two choices
GATEWAYS = 4  # that may send to one cell's vacant slots before it speaks again


class Cells:
    """`make`: a link to the schedulers at these addresses."""

    def __init__(
        self,
        make: Callable[[tuple[str, ...]], Link],
        listed: Callable[[], CellList],
        random: Random | None = None,
        settle_s: float = 0.0,
        on_ready: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`listed`: the newest list, asked for now and then. It raises nothing. `settle_s`: after it was read here, all
        other gateways have it, too. `on_ready` is called when a new list may have changed `ready`."""
        self._make, self._listed, self._random, self._settle_s = make, listed, random or Random(), settle_s
        self._on_ready = on_ready
        self._list = self._heard = CellList(0, ())  # the one that counts, and the newest one
        self._settled_s = 0.0  # when all gateways have that one, by the monotonic clock
        self.links: dict[str, Link] = {}  # by the name of the cell
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._log = structlog.get_logger()
        self.look(listed())

    # ---- the list ----

    async def run(self) -> None:
        """Keep the links until cancelled, and follow the list. Raises what a link raises."""
        try:
            while True:
                for name, link in self.links.items():
                    if name not in self._tasks:
                        with bound_contextvars(**({} if self.alone else {"cell": name})):  # in the lines of its log
                            self._tasks[name] = asyncio.create_task(link.run(), name=f"scheduler link {name}")
                await asyncio.wait(self._tasks.values(), timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                for task in self._tasks.values():
                    if task.done():
                        task.result()
                before = self._list
                self.look(self._listed())
                if self._list is not before and self._on_ready is not None:
                    await self._on_ready()
                await self._part()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def look(self, listed: CellList) -> None:
        """The newest list, whether it has changed or not."""
        if listed is not self._heard:
            self._heard = listed
            self._take(listed)

    def _take(self, listed: CellList) -> None:
        if listed.version < self._list.version:
            self._log.error("cells_of_an_older_version", version=listed.version, known=self._list.version)
            return
        for cell in listed.cells:
            if cell.name in self.links:
                self.links[cell.name].scheduler.move(cell.schedulers)
            else:
                self.links[cell.name] = self._make(cell.schedulers)
        if self._list.cells and listed.version == self._list.version:
            self._log.warning("cells_changed_within_a_version", version=listed.version)
        self._settled_s = time.monotonic() + self._settle_s
        if self._list.cells:
            self._log.info("cells", version=listed.version, cells=[cell.name for cell in listed.cells])
        self._list = listed

    async def _part(self) -> None:
        """From cells that are listed no more, once none of their requests is read here. A cell that cannot be reached
        is not told which ones to cancel: it ends those that no gateway follows."""
        unlisted = self.links.keys() - {cell.name for cell in self._list.cells}
        for name in [name for name in unlisted if self.links[name].lost or not self.links[name].feeds]:
            del self.links[name]
            if (task := self._tasks.pop(name, None)) is not None:
                task.cancel()
                await asyncio.wait([task])

    @property
    def version(self) -> int:
        """Of the list that counts."""
        return self._list.version

    @property
    def alone(self) -> bool:
        return len(self.links) == 1

    # ---- what is served ----

    @property
    def ready(self) -> bool:
        """Whether any cell takes new requests."""
        return bool(self.able(""))

    @property
    def live(self) -> int:
        """Requests that are read here, and those whose cancel a scheduler is still to acknowledge."""
        return sum(len(link.feeds) for link in self.links.values() if not link.lost)

    def models(self, *, ready: bool = False) -> dict[str, TextModel]:
        """By name. `ready`: those alone that a worker is there for."""
        known = (link for link in self.links.values() if link.model is not None and (link.ready or not ready))
        return {link.model.name: link.model for link in known if link.model is not None}

    # ---- where a request goes ----

    def new_id(self, model: str, priority: int, bare: str, beginning: str = "") -> str:
        """An id for a new request for this model, made of one that is unique. `priority`: the best is 0. `bare`: 32 hex
        digits. `beginning`: of its input (beginnings.py). Raises NotServing, UnknownModel."""
        if list(self.links) == [ONLY]:
            return bare
        return f"{self._choose(model, priority, beginning)}{SEPARATOR}{bare}"

    def _choose(self, model: str, priority: int, beginning: str) -> str:
        """The cell of its beginning while that has room; else the better of two cells that could serve it, by how long
        it would wait there."""
        if not (able := self.able(model)):
            if model and self.models() and model not in self.models():
                raise UnknownModel(f"model: there is no such model; this service has {', '.join(self.models())}")
            refusing = any(self.links[cell.name].refuses for cell in self._list.cells)
            why = "those that have a worker refuse: see their schedulers' logs" if refusing else "no warmed worker"
            raise NotServing(f"no cell takes new requests: {why}", retry_after_ms=RETRY_AFTER_MS)
        if beginning:
            own = max(able, key=lambda cell: weight(beginning, cell)).name
            full, _ = self.links[own].wait(priority, GATEWAYS)
            if not full:
                return own
        two = self._random.sample(able, min(CHOICES, len(able)))
        return min(two, key=lambda cell: self.links[cell.name].wait(priority)).name

    def able(self, model: str) -> list[Cell]:
        """The cells that take new requests for this model; empty: for any."""
        return [cell for cell in self._list.cells if not cell.drain and self._serves(self.links[cell.name], model)]

    def _serves(self, link: Link, model: str) -> bool:
        return link.ready and not link.refuses and link.model is not None and model in ("", link.model.name)

    async def home(self, request_id: str, model: str | None = None) -> Link:
        """The cell that has this request; if none has it, the one that would get it. `model`: which a new one is for;
        None: it is not new. Raises NotServing where that cannot be told: a cell that may have it cannot be asked, or
        another gateway may still go by an older list."""
        if self.alone:
            return next(iter(self.links.values()))
        if (drawn := _DRAWN.fullmatch(request_id)) and (link := self.links.get(drawn[1])):
            return link
        homes = [self.links[name] for name in self.homes(request_id, model)]
        for link in homes:
            if request_id in link.feeds:
                return link
        if len(homes) == 1:
            return homes[0]
        away: NotServing | None = None
        for link in homes:
            try:
                await link.scheduler.submission(request_id)
                return link
            except UnknownRequest:
                continue
            except NotServing as error:  # another cell may have it
                away = error
        if away is not None:
            raise away
        if model is not None and (left_s := self._settled_s - time.monotonic()) > 0:
            raise NotServing("the cell of this id has just changed", retry_after_ms=int(1e3 * left_s) + 1)
        return homes[0]

    def homes(self, request_id: str, model: str | None = None) -> list[str]:
        return homes_of(request_id, self._list.cells, model)

    def named(self, name: str) -> tuple[Link, str]:
        """The cell of CELL/REST, and the rest. Raises BadInput."""
        if self.alone:
            return next(iter(self.links.values())), name
        cell, _, rest = name.partition("/")
        if cell not in self.links:
            raise BadInput("worker_id", f"must be CELL/WORKER; cells are {', '.join(self.links)}")
        return self.links[cell], rest

    async def get_request(self, request: inference_pb2.GetRequestRequest) -> inference_pb2.GetRequestResponse:
        link = await self.home(request.request_id)
        names = [name for name, one in self.links.items() if one is link and not self.alone]
        answer = await link.scheduler.get_request(request)
        for name in names:
            in_cell(name, [answer.request])
        return answer

    # ---- all of them ----

    async def give_up(self, error: RequestError) -> None:
        await asyncio.gather(*(link.give_up(error) for link in self.links.values()))

    async def flush(self, timeout_s: float) -> None:
        await asyncio.gather(*(link.scheduler.flush(timeout_s) for link in self.links.values()))

    async def list_requests(self, request: inference_pb2.ListRequestsRequest) -> inference_pb2.ListRequestsResponse:
        """A page, cell by cell, those first that take no new requests. Its token, CELL/TOKEN, names the cell that the
        next page begins with. Raises BadInput, NotServing."""
        if self.alone:
            return await next(iter(self.links.values())).scheduler.list_requests(request)
        serving = {cell.name for cell in self._list.cells if not cell.drain}
        links = sorted(self.links.items(), key=lambda named: named[0] in serving)
        first, _, token = (request.page_token or f"{links[0][0]}/").partition("/")
        if first not in self.links:
            raise BadInput("page_token", "is not the next_page_token of an answer")
        away: RequestError | None = None
        answered = False
        page, size = inference_pb2.ListRequestsResponse(), min(request.page_size or PAGE, MOST_LISTED)
        for name, link in dropwhile(lambda named: named[0] != first, links):
            if len(page.requests) == size:
                page.next_page_token = f"{name}/"
                break
            asked = inference_pb2.ListRequestsRequest(
                page_size=size - len(page.requests), page_token=token, recent_rounds=request.recent_rounds
            )
            token = ""
            try:
                part = await link.scheduler.list_requests(asked)
            except BadInput:
                raise
            except RequestError as error:  # of a cell that is away, or too busy, nobody can tell
                away = error
                continue
            answered = True
            in_cell(name, part.requests)
            page.MergeFrom(part)
            if page.next_page_token:
                page.next_page_token = f"{name}/{page.next_page_token}"
                break
        if away is not None and not answered and not page.next_page_token:
            raise away  # else it would look as if nothing were live
        return page

    async def ask_all(self, ask: Callable[[Link], Awaitable[Reply]]) -> dict[str, Reply]:
        """The answers of the cells that give one, by name. Raises RequestError if none does."""
        asked = dict(self.links)  # the list may change while they answer
        answers = await asyncio.gather(*(ask(link) for link in asked.values()), return_exceptions=True)
        told = {name: one for name, one in zip(asked, answers, strict=True) if not isinstance(one, BaseException)}
        for answer in answers:
            if isinstance(answer, BaseException) and not (told and isinstance(answer, RequestError)):
                raise answer
        return told


def priority_of(number: int) -> int:
    """The place of a priority in a list that has the best first."""
    order = (types_pb2.PRIORITY_INTERACTIVE, types_pb2.PRIORITY_DEFAULT, types_pb2.PRIORITY_BATCH)
    return order.index(number) if number in order else 1
