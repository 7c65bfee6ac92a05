"""Simulated faults: a sample of schedules keeps the promise, and a service with a mistake in it does not.

`make sim-faults` runs tens of thousands, and says how a seed that failed is replayed.
"""

import asyncio
import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any
from unittest import mock
from weakref import WeakSet

import pytest
import structlog

from gateway.feed import Feed
from gateway.stream_states import Event
from scheduler_service.core.events import Cancelled
from scheduler_service.ledger import Ledger
from scheduler_service.persister import Persister
from scheduler_service.recovery import Recovery
from scheduler_service.requests import Requests
from scheduler_service.store import MemoryStore, Pulse, Verdict, memory
from tests.scheduler.faults.ends import current
from tests.scheduler.faults.loop import Process, VirtualLoop
from tests.scheduler.faults.schedule import schedule
from tests.scheduler.faults.stand_ins import simulated
from tests.scheduler.faults.world import run

SAMPLE = 100
BOUND = 100  # schedules, within which a mistake must be found


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    gc.disable()  # a schedule leaves its whole world behind, in cycles
    with simulated():
        yield
    gc.enable()
    structlog.configure(**before)


def test_every_accepted_request_ends_exactly_once_whatever_goes_wrong() -> None:
    broken = {seed: result.broken for seed in range(SAMPLE) if (result := run(schedule(seed))).broken}
    assert not broken, "replay with python -m tests.scheduler.faults --replay SEED"


def test_a_seed_is_a_schedule_step_by_step() -> None:
    first, again = (run(schedule(7)) for _ in range(2))
    assert replace(first) == again
    assert first.steps > 500


def test_what_is_killed_does_nothing_more_and_what_is_frozen_does_it_later() -> None:
    done: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(1)
            done.append(current().name)
        finally:
            done.append(f"{current().name} cleans up")

    async def story(loop: VirtualLoop) -> list[str]:
        killed, frozen = Process("killed", loop), Process("frozen", loop)
        for process in (killed, frozen):
            process.start(work())
        await asyncio.sleep(0.5)
        killed.kill()
        frozen.freeze()
        await asyncio.sleep(10)
        assert done == []
        frozen.thaw()
        await asyncio.sleep(0.001)
        return done.copy()

    loop = VirtualLoop()
    assert loop.run_until_complete(story(loop)) == ["frozen", "frozen cleans up"]
    loop.wind_up()


# ---- mistakes that the checker must find ----


@contextmanager
def no_fence() -> Iterator[None]:
    with mock.patch.object(MemoryStore, "_fence"), mock.patch.object(Pulse, "is_after", return_value=False):
        yield


def relayed_before_it_is_durable() -> AbstractContextManager[Any]:
    commit = Persister._commit

    async def too_early(self: Any, writes: Any) -> list[Verdict]:
        for write in writes:
            tracked = self._ledger.live.get(write.record.request.id)
            if tracked and tracked.stored and write.start == tracked.record.emitted:
                self._ledger._relay(write.record.request.id, replace_log(tracked), write)
                self._ledger.live[write.record.request.id] = tracked
        return await commit(self, writes)

    return mock.patch.object(Persister, "_commit", too_early)


def replace_log(tracked: Any) -> Any:
    return replace(tracked, log=deepcopy(tracked.log), rounds=list(tracked.rounds))


def nothing_is_written_anew() -> AbstractContextManager[Any]:
    return mock.patch.object(Ledger, "everything", return_value=[])


def an_end_is_no_end() -> AbstractContextManager[Any]:
    apply = memory._apply

    def applied(requests: Any, write: Any, again: bool) -> Any:
        stored = requests.get(write.record.request.id)
        if stored is not None and stored.ending is not None:
            requests[write.record.request.id] = replace(stored, ending=None)
        return apply(requests, write, again)

    return mock.patch.object(memory, "_apply", applied)


def nothing_is_read_back() -> AbstractContextManager[Any]:
    async def begin(self: Recovery, epoch: int) -> None:
        return

    return mock.patch.object(Recovery, "begin", begin)


def a_lost_gateway_cancels() -> AbstractContextManager[Any]:
    unlink = Requests.unlink

    def and_cancel(self: Requests, outbox: Any) -> None:
        for id in sorted(outbox.follows):
            self._durable.apply(Cancelled(id))
        unlink(self, outbox)

    return mock.patch.object(Requests, "unlink", and_cancel)


def submitted_only_once() -> AbstractContextManager[Any]:
    on, said = Feed.on, WeakSet[Feed]()

    def once(self: Feed, event: Event, error: Any = None) -> Any:
        messages = on(self, event, error)
        again = event is Event.LINK and not self.life.accepted and self in said
        said.add(self)
        return [] if again else messages

    return mock.patch.object(Feed, "on", once)


@pytest.mark.parametrize(
    ("mistake", "first"),
    [
        (no_fence, 39),
        (relayed_before_it_is_durable, 1),
        (nothing_is_written_anew, 11),
        (an_end_is_no_end, 6),
        (nothing_is_read_back, 8),
        (a_lost_gateway_cancels, 19),
        (submitted_only_once, 0),
    ],
)
def test_a_mistake_is_found(mistake: Callable[[], AbstractContextManager[Any]], first: int) -> None:
    """`first`: a seed that finds it, so that the search is short."""
    with mistake():
        assert any(run(schedule(seed)).broken for seed in range(first, first + BOUND))
