"""Requests that are sent again after their end, since their answers were lost: they are answered beside the commits."""

import asyncio

from protos.link.v1 import gateway_link_pb2 as pb
from scheduler_service.core.lifecycle import State
from scheduler_service.ledger import AT_ONCE, MAX_SENT_AGAIN, Ledger
from scheduler_service.outbox import GatewayOutbox
from scheduler_service.pace import UNITS, Turns
from scheduler_service.store import MemoryStore, Stored, Unreadable, Verdict, Write
from scheduler_service.store.rounds import encode
from scheduler_service.tracked import Tracked
from tests.scheduler.store.writes import record
from tests.waiting import until

LONG = UNITS * AT_ONCE  # rounds: they are told in several turns of the event loop


class Hanging(MemoryStore):
    """Says what it has once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()

    async def get(self, id: str) -> Stored | Unreadable | None:
        await self.answers.wait()
        return await super().get(id)


def sent_again(ledger: Ledger, id: str, outbox: GatewayOutbox) -> tuple[Write, Verdict]:
    """The store says that there was such a request before."""
    ledger.live[id] = Tracked(pb.Submit(request_id=id, prompt=[1] * 4), record(id))
    ledger.join(id, outbox)
    return Write(record(id)), Verdict.EXISTS


async def test_an_answer_that_is_told_again_keeps_no_commit_waiting() -> None:
    """However long it is, and though the store hangs."""
    store, outbox = Hanging(), GatewayOutbox()
    ledger = Ledger(store, lambda id: None, Turns(UNITS))
    telling = asyncio.create_task(ledger.durable([sent_again(ledger, "a", outbox)]))
    await asyncio.sleep(0)
    assert telling.done()
    ended, submit = record("a", emitted=LONG, state=State.FINISHED), pb.Submit(request_id="a", prompt=[1] * 4)
    log = b"".join(encode([token], 0, 0) for token in range(LONG))
    store._requests["a"] = Stored(ended, submit.SerializeToString(), log, b"")
    answering = asyncio.create_task(ledger.answer_again())
    deltas: list[pb.Delta] = []

    async def whole() -> bool:
        deltas.extend(outbox.take().deltas)
        return bool(deltas) and deltas[-1].HasField("ending")

    store.answers.set()
    await until(whole)
    answering.cancel()
    assert [token for delta in deltas for token in delta.tokens] == [*range(LONG)]


async def test_of_too_many_requests_that_are_sent_again_the_last_are_to_come_later() -> None:
    outbox, ledger = GatewayOutbox(), Ledger(Hanging(), lambda id: None)
    await ledger.durable([sent_again(ledger, f"r{number}", outbox) for number in range(MAX_SENT_AGAIN + 2)])
    told = outbox.take().refusals
    assert [one.request_id for one in told] == [f"r{MAX_SENT_AGAIN}", f"r{MAX_SENT_AGAIN + 1}"]
    assert all(one.retry_after_s > 0 for one in told)
