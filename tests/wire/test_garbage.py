"""When reference cycles are searched for."""

import asyncio
import gc
import weakref
from unittest import mock

import pytest

from protos import garbage


@pytest.mark.parametrize("idle", [True, False])
async def test_a_cycle_of_new_objects_is_found_though_requests_are_live(
    idle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Node:
        itself: "Node"

    monkeypatch.setattr(garbage, "EVERY_S", 0.0)
    monkeypatch.setattr(garbage, "SELDOM_S", 0.0)
    searching = asyncio.create_task(garbage.search(lambda: idle))
    await asyncio.sleep(0)
    node = Node()
    node.itself, found = node, weakref.ref(node)
    del node
    for _ in range(3):
        await asyncio.sleep(0)
    assert found() is None
    searching.cancel()
    await asyncio.gather(searching, return_exceptions=True)
    assert gc.isenabled()


@pytest.mark.parametrize(
    ("idle", "blocks", "whole"),
    [(True, 0, True), (False, 2 * 10 + garbage.SLACK, False), (False, 2 * 10 + garbage.SLACK + 1, True)],
)
async def test_all_objects_are_searched_without_live_requests_or_when_half_may_be_garbage(
    monkeypatch: pytest.MonkeyPatch, idle: bool, blocks: int, whole: bool
) -> None:
    searched = asyncio.Event()
    collector = mock.Mock(collect=mock.Mock(side_effect=lambda *_: searched.set()), get_count=lambda: (0, 0, 0))
    allocated = mock.Mock(side_effect=[10, *[blocks] * 9])
    monkeypatch.setattr(garbage, "gc", collector)
    monkeypatch.setattr(garbage, "SELDOM_S", 0.0)
    monkeypatch.setattr(garbage, "LOOK_EVERY", 1)
    monkeypatch.setattr("sys.getallocatedblocks", allocated)
    searching = asyncio.create_task(garbage.search(lambda: idle))
    await searched.wait()
    searching.cancel()
    assert collector.collect.call_args_list[0] == (mock.call() if whole else mock.call(0))


@pytest.mark.parametrize(("new", "pause_s"), [(garbage.MANY, garbage.SELDOM_S), (garbage.MANY + 1, garbage.EVERY_S)])
async def test_the_next_search_comes_soon_only_if_many_objects_were_new(
    monkeypatch: pytest.MonkeyPatch, new: int, pause_s: float
) -> None:
    pauses = list[float]()

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) > 1:
            raise asyncio.CancelledError

    monkeypatch.setattr(garbage, "gc", mock.Mock(get_count=lambda: (new, 0, 0)))
    monkeypatch.setattr("asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await garbage.search(lambda: False)
    assert pauses == [garbage.SELDOM_S, pause_s]
