"""What a leader keeps of requests that ended, as long as the store might have lost them; and how it tells of them."""

import asyncio

from protos.v1 import gateway_link_pb2 as pb
from scheduler_service.core.lifecycle import State
from scheduler_service.ledger import AT_ONCE, ENDED_KEPT_S, Ledger, Tracked
from scheduler_service.store import MemoryStore, Verdict, Write
from tests.scheduler.test_store_contract import record


class Book(Ledger):
    """With one request that ends now, and a clock that is set."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(), lambda: self.now, lambda id: None)
        self.now = 0.0

    async def end(self, id: str) -> None:
        ended = record(id, state=State.FINISHED)
        self.live[id] = Tracked(pb.Submit(request_id=id), ended, stored=True)
        await self.durable([(Write(ended, ending=b""), Verdict.APPLIED)])

    @property
    def kept(self) -> list[str]:
        return [write.record.request.id for write in self.everything()]


async def test_a_request_that_ended_long_ago_takes_no_memory() -> None:
    book = Book()
    await book.end("a")
    book.now = ENDED_KEPT_S - 1
    await book.end("b")
    assert book.kept == ["a", "b"]
    book.now = ENDED_KEPT_S + 1
    await book.durable([])
    assert book.kept == ["b"]


async def test_what_ended_before_the_store_went_away_is_kept_however_long_it_stays_away() -> None:
    book = Book()
    await book.end("a")
    book.now = 100 * ENDED_KEPT_S
    assert book.kept == ["a"]


async def test_what_has_just_ended_is_known_though_the_store_has_lost_it() -> None:
    book = Book()
    await book.end("a")
    assert (await book.submission("a")).request_id == "a"
    stored = await book.stored("a")
    assert stored is not None
    assert stored.record.state is State.FINISHED


async def test_while_much_is_told_commands_get_their_turns() -> None:
    book = Book()
    ended = [record(f"r{i}", state=State.FINISHED) for i in range(4 * AT_ONCE)]
    book.live = {one.request.id: Tracked(pb.Submit(request_id=one.request.id), one, stored=True) for one in ended}
    telling = asyncio.create_task(book.durable([(Write(one, ending=b""), Verdict.APPLIED) for one in ended]))
    turns = []
    while not telling.done():
        await asyncio.sleep(0)
        turns.append(len(book.live))
    assert len(set(turns)) >= 4
    assert not book.live
