"""What people may look at: who is live, and how long each still waits."""

from itertools import chain
from math import inf

import pytest

from protos.bounds import MOST_LISTED
from protos.errors import BadInput
from protos.v1.inference_pb2 import ListRequestsRequest
from scheduler_service.config import Settings
from scheduler_service.core.events import Cancelled
from scheduler_service.core.outlook import in_order, remaining_s, waits_behind_s, waits_s
from scheduler_service.insight import list_requests
from scheduler_service.leader import Leader
from scheduler_service.store import MemoryStore
from tests.scheduler.builders import FakeWorker, core


def paused_and_running() -> FakeWorker:
    """`long` has been preempted by `short`."""
    worker = FakeWorker(core("srpt-length"), {"long": 50, "short": 10})
    worker.submit("long", predicted_tokens=50)
    worker.step()
    worker.submit("short", predicted_tokens=10)
    worker.step()
    return worker


def test_those_that_have_begun_are_listed_before_those_that_wait() -> None:
    worker = paused_and_running()
    worker.submit("next", predicted_tokens=20)
    worker.submit("last", predicted_tokens=30)
    pieces = list(in_order(worker.core.fleet, at_once=2))
    assert list(chain.from_iterable(pieces)) == ["short", "long", "next", "last"]
    assert max(map(len, pieces)) <= 2


def test_a_paused_request_waits_for_those_before_it() -> None:
    fleet = paused_and_running().core.fleet
    assert waits_s(fleet, ["short", "long"]) == [0, remaining_s(fleet, "short")]


@pytest.mark.parametrize("tenants", [2, 4, 6])
def test_a_page_survives_that_a_tenants_requests_end_while_it_is_put_together(tenants: int) -> None:
    worker = FakeWorker(core("fcfs"), {})
    fleet = worker.core.fleet
    ids = [f"{tenant}-{number}" for tenant in range(tenants) for number in range(4)]
    for id in ids:
        worker.submit(id, tenant=id[0])
        fleet.entries[id].flow.catch_up(float(id[0]))  # so that they follow one another
    pieces, listed = in_order(fleet, at_once=2), list[str]()
    while not listed:
        listed += next(pieces)
    for id in ids[-4:]:
        worker.core.observe(Cancelled(id), 0.0)
    listed += chain.from_iterable(pieces)
    assert set(ids[:-4]) <= set(listed)


def test_a_place_that_was_looked_up_before_others_ended_is_still_answered() -> None:
    fleet = paused_and_running().core.fleet
    both_s = sum(remaining_s(fleet, id) for id in ("short", "long"))
    assert waits_behind_s(fleet, [4]) == [pytest.approx(2 * both_s)]  # as if four were like the two that are left
    assert waits_behind_s(core("fcfs").fleet, [4]) == [0]


def test_a_length_is_never_believed_below_what_there_is() -> None:
    worker = FakeWorker(core("fcfs"), {"a": 10})
    worker.submit("a", predicted_tokens=2)
    assert worker.core.fleet.entries["a"].predicted_tokens == 2
    worker.run(5)
    assert worker.core.fleet.entries["a"].predicted_tokens == 5


async def test_requests_are_listed_page_by_page_the_in_order_first() -> None:
    settings = Settings(_cli_parse_args=False, policy="fcfs", max_backlog_s=inf)  # type: ignore[call-arg]
    leader = Leader(settings, MemoryStore())
    ids = [f"{i:03d}" for i in range(MOST_LISTED + 10)]
    FakeWorker(leader.core, dict.fromkeys(ids, 10)).submit(*ids)
    first = await list_requests(leader, ListRequestsRequest(page_size=3))
    assert [status.position for status in first.requests] == [0, 1, 2]
    rest = await list_requests(leader, ListRequestsRequest(page_size=100_000, page_token=first.next_page_token))
    assert len(rest.requests) == MOST_LISTED
    last = await list_requests(leader, ListRequestsRequest(page_token=rest.next_page_token))
    assert [status.request_id for status in (*first.requests, *rest.requests, *last.requests)] == ids
    assert not last.next_page_token


@pytest.mark.parametrize("token", ["-1", "x", "9" * 10])
async def test_a_page_token_of_somebody_elses_making_is_refused(token: str) -> None:
    settings = Settings(_cli_parse_args=False)  # type: ignore[call-arg]
    with pytest.raises(BadInput, match="page_token: is not the next_page_token of an answer"):
        await list_requests(Leader(settings, MemoryStore()), ListRequestsRequest(page_token=token))
