"""Nothing that a peer asks holds the scheduler's event loop: counted in what is done between two turns of the loop."""

import asyncio
from itertools import accumulate, chain, pairwise
from math import inf

import pytest

from protos.errors import QueueFull
from protos.link.v1 import common_pb2 as common_pb
from protos.link.v1 import gateway_link_pb2 as gateway_pb
from protos.models import digest
from protos.v1 import inference_pb2 as inference_pb
from protos.v1 import types_pb2 as types_pb
from scheduler_service import insight
from scheduler_service.config import Settings
from scheduler_service.leader import ENDED_AT_ONCE, Leader
from scheduler_service.links.gateways import GatewayLink
from scheduler_service.outbox import GatewayOutbox, Outboxes
from scheduler_service.pace import MAX_WAITING, MESSAGES, UNITS, Lane, Questions, Turns
from scheduler_service.session import Sessions, WorkerSession
from scheduler_service.store import MemoryStore, Stored, StoreUnavailable
from tests.scheduler.builders import FakeWorker
from tests.scheduler.live import MODEL, ScriptedGateway, ScriptedWorker, scheduler
from tests.scheduler.virtual_worker import Stream
from tests.waiting import WAIT_S

STOP = types_pb.FINISH_REASON_STOP


async def test_stats_let_others_run_while_they_count(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(_cli_parse_args=False, policy="fcfs", max_backlog_s=inf)  # type: ignore[call-arg]
    leader = Leader(settings, MemoryStore())
    ids = [f"{number}" for number in range(64)]
    FakeWorker(leader.core, dict.fromkeys(ids, 10)).submit(*ids)
    monkeypatch.setattr(insight, "COUNTED_AT_ONCE", 8)
    answer = asyncio.create_task(insight.stats(leader))
    turns = 0
    while not answer.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 64 // 8
    assert (await answer).waiting == 64


async def test_those_who_ask_come_one_at_a_time_and_not_too_many() -> None:
    questions, inside, most = Questions(), 0, 0

    async def ask() -> None:
        nonlocal inside, most
        async with questions.one():
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1

    answers = await asyncio.gather(*(ask() for _ in range(MAX_WAITING + 3)), return_exceptions=True)
    assert most == 1
    assert [type(answer) for answer in answers if answer] == [QueueFull] * 3


def test_a_gateway_gets_the_model_once() -> None:
    """It is megabytes, and each worker that comes or goes is a change of the service."""
    outbox = GatewayOutbox()

    def sent(model: common_pb.ModelInfo | None) -> bool:
        message = gateway_pb.ToGateway(serving=gateway_pb.Serving(ready=model is not None))
        outbox.serving(model)
        return outbox.unsent_model(message) is not None

    other = common_pb.ModelInfo(fingerprint="other", context_tokens=1)
    assert [sent(model) for model in (None, MODEL, MODEL, None, MODEL, other)] == [
        False,
        True,
        False,
        False,
        False,
        True,
    ]


def test_a_gateway_that_says_which_model_it_has_is_not_sent_it_again() -> None:
    message = gateway_pb.ToGateway(serving=gateway_pb.Serving(ready=True))
    other = common_pb.ModelInfo(fingerprint=MODEL.fingerprint, context_tokens=MODEL.context_tokens + 1)
    for model, sent in ((MODEL, False), (other, True)):
        outbox = GatewayOutbox(has_model=digest(MODEL))
        outbox.serving(model)
        assert (outbox.unsent_model(message) is not None) == sent


def test_gateways_hear_that_the_store_refuses_those_that_come_later_too() -> None:
    outboxes, there, later = Outboxes(), GatewayOutbox(), GatewayOutbox()
    outboxes.link(there)
    outboxes.announce(MODEL)
    outboxes.refuses(True)
    outboxes.link(later)
    for outbox in (there, later):
        serving = outbox.take().serving
        assert (serving.ready, serving.refuses) == (True, True)
    outboxes.refuses(True)
    assert not there.filled.is_set()
    outboxes.refuses(False)
    assert (there.take().serving.refuses, later.take().serving.refuses) == (False, False)


def test_to_end_a_request_only_the_worker_that_has_it_is_woken() -> None:
    sessions = Sessions()
    first, second = (WorkerSession(name, name, sent={}) for name in ("first", "second"))
    for session in (first, second):
        sessions.open(session)
    sessions.sent(first, [("a", 1)])
    sessions.wake_holder("a")
    assert (first.wake.is_set(), second.wake.is_set()) == (True, False)
    first.wake.clear()
    sessions.sent(second, [("a", 2)])
    assert first.wake.is_set()  # it has to forget the request, which has gone elsewhere
    sessions.close(second)
    first.wake.clear()
    sessions.wake_holder("a")
    assert not first.wake.is_set()


async def test_a_store_that_hangs_does_not_hold_up_a_gateways_submits_and_cancels() -> None:
    class Hangs(MemoryStore):
        async def get(self, id: str) -> Stored | None:
            await asyncio.get_running_loop().create_future()
            raise StoreUnavailable("never")

    async with scheduler(Hangs()) as (_, target):
        gateway, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await gateway.until(lambda: gateway.serving.ready)
        await gateway.follow("ended long ago")
        await gateway.submit("a")
        await worker.until("a")
        await gateway.cancel("a")
        await gateway.until(lambda: "a" in gateway.endings)
        await gateway.close()
        await worker.close()


async def test_a_request_ends_if_its_gateway_is_lost_and_none_asks_for_it() -> None:
    async with scheduler(MemoryStore(), orphan_timeout_s=0.1) as (leader, target):
        lost, worker = ScriptedGateway(target), await ScriptedWorker(target).attach()
        await lost.until(lambda: lost.serving.ready)
        await lost.submit("orphan")
        await lost.submit("detached", on_disconnect=types_pb.ON_DISCONNECT_DETACH)
        await worker.until("orphan", "detached")
        await lost.close()
        await worker.until("detached")
        assert list(leader.core.fleet.entries) == ["detached"]
        await worker.close()


async def test_a_burst_of_cancels_lets_others_have_their_turns() -> None:
    """All that a client had asked for, when it goes."""
    settings = Settings(_cli_parse_args=False, max_backlog_s=inf)  # type: ignore[call-arg]
    leader, stream = Leader(settings, MemoryStore()), Stream(lambda _: None)
    for number in range(4 * UNITS):
        leader.durable.submit(gateway_pb.Submit(request_id=f"{number}", prompt=[1]), "", GatewayOutbox())
        cancel = gateway_pb.Cancel(request_id=f"{number}")
        stream.said.put_nowait(gateway_pb.FromGateway(cancel=cancel))
    link, live = asyncio.create_task(GatewayLink(lambda: leader).Link(stream, stream)), [4 * UNITS]
    while live[-1]:
        await asyncio.sleep(0)
        live.append(len(leader.core.fleet.entries))
    assert max(before - after for before, after in pairwise(live)) <= UNITS
    link.cancel()
    await asyncio.wait([link])


async def test_requests_with_one_deadline_end_a_few_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_service.leader.TICK_S", 0.0)
    settings, now = Settings(_cli_parse_args=False, max_backlog_s=inf), 0.0  # type: ignore[call-arg]
    leader = Leader(settings, MemoryStore(), clock=lambda: now)
    for number in range(8 * ENDED_AT_ONCE):
        leader.durable.submit(gateway_pb.Submit(request_id=f"{number}", prompt=[1], timeout_s=5.0), "", GatewayOutbox())
    now, live = 6.0, [8 * ENDED_AT_ONCE]
    running = asyncio.create_task(leader._tick())
    while live[-1]:
        await asyncio.sleep(0)
        live.append(len(leader.core.fleet.entries))
    assert max(before - after for before, after in pairwise(live)) <= 2 * ENDED_AT_ONCE
    running.cancel()


async def counted_by_turn(turns: Turns, pieces: list[int]) -> list[list[int]]:
    """Those of the pieces of work (units of each) that were done in each turn of the loop, all asked for at once."""
    done: list[list[int]] = [[]]

    async def work(units: int) -> None:
        await turns.room(units)
        done[-1].append(units)

    working = asyncio.gather(*map(work, pieces))
    while not working.done():
        done.append([])
        await asyncio.sleep(0)
    return [each for each in done if each]


@pytest.mark.parametrize("pieces", [[1] * 40, [3, 2] * 10, [8] * 5, [7, 2, 7, 2]])
async def test_a_turn_of_the_loop_holds_so_many_units_of_work(pieces: list[int]) -> None:
    done = await counted_by_turn(Turns(8), pieces)
    assert max(map(sum, done)) <= 8
    assert list(chain.from_iterable(done)) == pieces


async def test_who_asks_for_more_as_soon_as_it_has_had_some_gets_no_second_turn_at_once() -> None:
    turns, done = Turns(4), [0]

    async def work() -> None:
        for _ in range(5):
            await turns.room()
            done[-1] += 1

    working = asyncio.gather(*(work() for _ in range(4)))
    while not working.done():
        done.append(0)
        await asyncio.sleep(0)
    assert max(done) == 4
    assert sum(done) == 20


async def test_work_of_more_units_than_a_turn_has_gets_a_turn_alone() -> None:
    assert await counted_by_turn(Turns(8), [1, 200, 1, 1]) == [[1], [200], [1, 1]]


async def test_a_gateway_gets_its_turn_however_many_workers_wait() -> None:
    """Its requests come one after another in one stream, while sixty workers have a report each."""
    turns, asked = Turns(8), 0

    async def worker() -> None:
        while True:
            await turns.room(4, Lane.REPORTS)

    async def gateway() -> None:
        nonlocal asked
        while True:
            await turns.room(4, Lane.GATEWAYS)
            asked += 1

    asking = [asyncio.create_task(one()) for one in (*[worker] * 60, gateway)]
    for _ in range(100):
        await asyncio.sleep(0)
    for task in asking:
        task.cancel()
    assert asked >= 45  # it asks again in the turn in which it has got one, and gets the next one two turns later


async def test_work_that_is_cancelled_while_it_waits_delays_no_other_of_its_kind() -> None:
    turns = Turns(8)

    async def gateway() -> None:
        while True:
            await turns.room(8, Lane.GATEWAYS)

    asking = [asyncio.create_task(gateway()) for _ in range(2)]
    await asyncio.sleep(0)
    cancelled = [asyncio.create_task(turns.room(100, Lane.REPORTS)) for _ in range(64)]
    await asyncio.sleep(0)
    for task in cancelled:
        task.cancel()
    report = asyncio.create_task(turns.room(1, Lane.REPORTS))
    for _ in range(40):
        await asyncio.sleep(0)
    assert report.done()
    for task in asking:
        task.cancel()


async def test_a_report_that_was_read_is_answered_before_many_more_are_read() -> None:
    turns, done = Turns(8), list[Lane]()

    async def worker() -> None:
        for lane in (Lane.REPORTS, Lane.COMMANDS):
            await turns.room(4, lane)
            done.append(lane)

    await asyncio.gather(*(worker() for _ in range(20)))
    unanswered = accumulate(1 if lane is Lane.REPORTS else -1 for lane in done)
    assert max(unanswered) <= 4  # a turn holds two, and those that answer wait for the next


async def test_work_that_does_not_wait_leaves_less_to_the_others() -> None:
    """A commit that is encoded in parts, or an answer that is put together in parts."""
    turns, done, over = Turns(8), [[0, 0]], False

    async def waits() -> None:
        for _ in range(20):
            await turns.room(2)
            done[-1][0] += 2

    async def never_waits() -> None:
        while not over:
            done[-1][1] += 5
            await turns.pause(5)

    others = asyncio.gather(*(waits() for _ in range(6)))
    commit = asyncio.create_task(never_waits())
    while not others.done():
        done.append([0, 0])
        await asyncio.sleep(0)
    over = True
    await commit
    assert sum(units for units, _ in done) == 6 * 20 * 2
    assert max(map(sum, done[3:])) <= 8  # the first two turns, in which nothing was known of the commit, aside


async def test_however_much_does_not_wait_the_others_get_on() -> None:
    turns, working = Turns(8), True

    async def never_waits() -> None:
        while working:
            await turns.pause(100)

    commit = asyncio.create_task(never_waits())
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*(turns.room(3) for _ in range(50)))
    working = False
    await commit


async def test_work_is_done_at_once_where_there_is_room() -> None:
    turns = Turns(8)
    room = turns.room(8)
    with pytest.raises(StopIteration):
        room.send(None)


async def test_a_turn_of_the_loop_holds_few_messages_to_gateways() -> None:
    """With many gateways a step has something for each. What comes while one waits goes into its one message."""
    leader = Leader(Settings(_cli_parse_args=False), MemoryStore())  # type: ignore[call-arg]
    link, heard = GatewayLink(lambda: leader), 0

    def hear(_: object) -> None:
        nonlocal heard
        heard += 1

    gateways = 5 * MESSAGES
    streams = [Stream(hear) for _ in range(gateways)]
    links = [asyncio.create_task(link.Link(stream, stream)) for stream in streams]
    counted = [0]
    while heard < gateways:  # each is told at once whether anybody serves
        before = heard
        await asyncio.sleep(0)
        counted.append(heard - before)
        if heard:
            leader.outboxes.announce(None)
    assert max(counted) <= MESSAGES
    assert heard == gateways
    for task in links:
        task.cancel()
    await asyncio.gather(*links, return_exceptions=True)


async def test_who_is_cancelled_while_it_waits_for_its_turn_keeps_nobody_waiting() -> None:
    turns = Turns(4)
    waiting = [asyncio.create_task(turns.room()) for _ in range(12)]
    await asyncio.sleep(0)
    for task in waiting[4:8]:
        task.cancel()
    await asyncio.gather(*waiting[8:])


async def test_a_deep_page_lets_others_run_while_it_passes_over_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(_cli_parse_args=False, policy="fcfs", max_backlog_s=inf)  # type: ignore[call-arg]
    leader = Leader(settings, MemoryStore())
    ids = [f"{number}" for number in range(64)]
    FakeWorker(leader.core, dict.fromkeys(ids, 10)).submit(*ids)
    monkeypatch.setattr(insight, "COUNTED_AT_ONCE", 8)
    asked = inference_pb.ListRequestsRequest(page_size=4, page_token="56")
    answer = asyncio.create_task(insight.list_requests(leader, asked))
    turns = 0
    while not answer.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 56 // 8
    assert len((await answer).requests) == 4
