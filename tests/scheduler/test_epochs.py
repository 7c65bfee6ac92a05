"""Who leads when a worker has obeyed a leader of a higher epoch than the store knows of."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from protos.link.v1.worker_link_pb2_grpc import add_WorkerLinkServicer_to_server
from scheduler_service.__main__ import LeaderSlot, hold, make_server
from scheduler_service.config import Settings
from scheduler_service.leader import Leader
from scheduler_service.links.workers import WorkerLink
from scheduler_service.store import Fenced, MemoryStore, Pulse, StoreUnavailable
from tests.scheduler.live import WAIT_S, ScriptedWorker
from tests.waiting import until

MINUTE_MS, DAY_MS = 60_000, 24 * 3600 * 1000


async def led(slot: LeaderSlot, *before: Leader | None) -> Leader:
    """By whom, once it is somebody else than before."""

    async def changed() -> bool:
        return slot.leader not in (None, *before)

    await until(changed)
    assert slot.leader is not None
    return slot.leader


@asynccontextmanager
async def held(store: MemoryStore, *, standby: bool) -> AsyncIterator[tuple[LeaderSlot, str, asyncio.Task[None]]]:
    """A scheduler, once it leads."""
    settings = Settings(_cli_parse_args=False, standby=standby, lease_s=0.5)  # type: ignore[call-arg]
    slot, server = LeaderSlot(), make_server(settings)
    add_WorkerLinkServicer_to_server(WorkerLink(slot), server.grpc)
    port = await server.start("127.0.0.1", 0)
    holding = asyncio.create_task(hold(settings, store, server, slot))
    try:
        await led(slot)
        yield slot, f"127.0.0.1:{port}", holding
    finally:
        holding.cancel()
        await asyncio.wait([holding], timeout=WAIT_S)
        if slot.leader is not None:
            await slot.leader.close()
        await server.stop(0)


async def answer(target: str, max_epoch: int) -> grpc.StatusCode | int:
    """To a worker that has obeyed `max_epoch`: the leader's epoch, or the status that sends it away."""
    worker = ScriptedWorker(target)
    try:
        return (await worker.attach(max_epoch=max_epoch)).welcome.epoch
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        await worker.close()


@pytest.mark.parametrize("standby", [False, True])
async def test_a_store_that_has_lost_its_epoch_gets_one_above_what_workers_obeyed(standby: bool) -> None:
    """Empty Redis, and a leader whose clock is behind that of the one before it. (Simulated faults, seed 400802.)"""
    async with held(MemoryStore(), standby=standby) as (slot, target, _):
        leader = await led(slot)
        obeyed = leader.epoch + MINUTE_MS
        assert await answer(target, obeyed) is grpc.StatusCode.UNAVAILABLE
        leader = await led(slot, leader)
        assert leader.epoch > obeyed
        assert await answer(target, obeyed) == leader.epoch


async def test_a_leader_whose_stepping_down_was_not_answered_leads_again_as_well() -> None:
    class Unheard(MemoryStore):
        async def step_down(self, epoch: int) -> None:
            raise StoreUnavailable("did not answer")

    async with held(Unheard(), standby=False) as (slot, target, _):
        leader = await led(slot)
        obeyed = leader.epoch + MINUTE_MS
        assert await answer(target, obeyed) is grpc.StatusCode.UNAVAILABLE
        leader = await led(slot, leader)
        assert leader.epoch > obeyed


async def test_whom_a_worker_has_obeyed_and_who_leads_is_not_driven_out() -> None:
    store = MemoryStore()
    async with held(store, standby=False) as (_, target, holding):
        other = await store.lead(0)
        assert await answer(target, other) is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(Fenced):
            await asyncio.wait_for(holding, WAIT_S)
        assert await store.pulse() == Pulse(other, 0)


async def test_an_epoch_that_no_clock_can_have_given_is_bad_input() -> None:
    async with held(MemoryStore(), standby=False) as (slot, target, _):
        leader = await led(slot)
        assert await answer(target, leader.epoch + 2 * DAY_MS) is grpc.StatusCode.INVALID_ARGUMENT
        assert await answer(target, leader.epoch) == leader.epoch


async def test_workers_of_a_leader_whose_clock_was_days_ahead_come_back_once_it_is_mended() -> None:
    store = MemoryStore()
    ahead = await store.lead(int(time.time() * 1000) + 2 * DAY_MS)
    async with held(store, standby=False) as (slot, target, _):
        leader = await led(slot)
        assert leader.epoch > ahead
        for obeyed in (ahead, leader.epoch):
            assert await answer(target, obeyed) == leader.epoch
        assert await answer(target, leader.epoch + 1) is grpc.StatusCode.INVALID_ARGUMENT
