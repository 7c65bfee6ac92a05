"""A silent peer is found, and no peer is blamed for what this process did in the meantime."""

import asyncio

import pytest

from protos.silence import LOOKS, Silence
from tests.waiting import until

WAIT_S = 15.0  # until something that must happen counts as missing


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protos.silence.SILENT_S", 0.2)


class Peer:
    def __init__(self) -> None:
        self.says = asyncio.Queue[str]()

    async def read(self) -> str:
        return await self.says.get()


async def test_a_peer_that_says_nothing_is_silent() -> None:
    silence = Silence()
    read = asyncio.create_task(silence.read(Peer()))
    with pytest.raises(TimeoutError, match=r"nothing was said for 0\.2 s"):
        await asyncio.wait_for(silence.lasts(), WAIT_S)
    read.cancel()


async def test_a_peer_is_not_silent_while_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protos.silence.SILENT_S", 0.0)  # a look in each turn of the loop
    silence, peer = Silence(), Peer()
    peer.says.put_nowait("hello")
    assert await silence.read(peer) == "hello"
    watched = asyncio.create_task(silence.lasts())
    for _ in range(3 * LOOKS):
        await asyncio.sleep(0)
    assert not watched.done()
    watched.cancel()


async def test_each_read_begins_to_wait_anew() -> None:
    silence, peer = Silence(), Peer()

    async def waited() -> bool:
        return silence._looks >= 2

    read = asyncio.create_task(silence.read(peer))
    watched = asyncio.create_task(silence.lasts())
    await until(waited)
    peer.says.put_nowait("I am here")
    await read
    read = asyncio.create_task(silence.read(peer))
    await asyncio.sleep(0)
    assert silence._looks == 0
    for task in (read, watched):
        task.cancel()


async def test_a_process_that_stood_still_blames_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    silence = Silence()
    read = asyncio.create_task(silence.read(Peer()))
    watched = asyncio.create_task(silence.lasts())
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + 60)  # as after a minute in which the process was stopped
    for _ in range(3):
        await asyncio.sleep(0)
    assert not watched.done()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(watched, WAIT_S)
    read.cancel()
