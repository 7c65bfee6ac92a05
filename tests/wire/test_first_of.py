"""`protos.serving.first_of`: several waits at once, none of which outlives the others."""

import asyncio

import pytest

from protos.serving import first_of


async def test_the_others_have_ended_when_it_returns() -> None:
    ended = asyncio.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    await first_of(forever, lambda: asyncio.sleep(0))
    assert ended.is_set()


async def test_cancelled_twice_it_still_waits_for_one_that_loses_a_cancellation() -> None:
    begun, lost, released = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def loses_a_cancellation() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            lost.set()
            await released.wait()

    waiting = asyncio.create_task(first_of(loses_a_cancellation))
    await begun.wait()
    waiting.cancel()
    await lost.wait()
    waiting.cancel()
    await asyncio.sleep(0)
    assert not waiting.done()
    released.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
