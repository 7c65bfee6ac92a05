"""Fixtures of the tests of OpenAI's API. Servers are started in harness.py."""

import asyncio

import pytest

from gateway.openai import sse


@pytest.fixture
def commented(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Comments are written after moments of silence. Set once one was."""
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.01)
    written, write = asyncio.Event(), sse.Events.write

    async def spied(events: sse.Events, data: bytes, *, more: bool = True) -> None:
        await write(events, data, more=more)
        if data.startswith(b":"):
            written.set()

    monkeypatch.setattr(sse.Events, "write", spied)
    return written
