"""When reference cycles are searched for."""

import asyncio
import gc
import weakref
from itertools import pairwise
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
    collector = mock.Mock(collect=mock.Mock(side_effect=lambda *_: searched.set()))
    allocated = mock.Mock(side_effect=[10, *[blocks] * 9])
    monkeypatch.setattr(garbage, "gc", collector)
    monkeypatch.setattr(garbage, "EVERY_S", 0.0)
    monkeypatch.setattr(garbage, "LOOK_EVERY", 1)
    monkeypatch.setattr("sys.getallocatedblocks", allocated)
    searching = asyncio.create_task(garbage.search(lambda: idle))
    await searched.wait()
    searching.cancel()
    assert collector.collect.call_args_list[0] == (mock.call() if whole else mock.call(0))


@pytest.mark.parametrize(
    ("took_s", "pauses_s"),
    [(0.001, [0.02, 0.01, 0.005, 0.005]), (0.0002, [0.02, 0.02]), (0.0, [0.02, 0.04, 0.04])],
)
def test_the_longer_a_search_takes_the_sooner_the_next_one_comes(took_s: float, pauses_s: list[float]) -> None:
    for pause_s, after_s in pairwise(pauses_s):
        assert garbage._next_pause_s(pause_s, took_s) == after_s
