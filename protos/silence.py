"""How a peer on a stream is found to have fallen silent: it hangs, it was stopped, or its machine has gone. Only reads
are watched here, never writes."""

import asyncio
from math import inf
from typing import Protocol, TypeVar

SILENT_S = 5.0  # the link to a peer that sends nothing for this long counts as broken
LOOKS = 10  # within SILENT_S: silence is noticed a tenth later at most

Message_co = TypeVar("Message_co", covariant=True)


class Readable(Protocol[Message_co]):
    async def read(self) -> Message_co: ...


class Silence:
    """The silence of one stream's peer. A timeout around each read would cost as much as relaying a row, and would
    blame the peer for a time in which this process stood still. So `lasts`, beside the reads, counts how often it has
    seen one of them wait."""

    def __init__(self) -> None:
        self._looks = -inf  # so often the read was seen to wait; -inf: none waits

    async def read(self, stream: Readable[Message_co]) -> Message_co:
        self._looks = 0
        message = await stream.read()
        self._looks = -inf
        return message

    async def lasts(self) -> None:
        """Raise TimeoutError once a read has waited for SILENT_S in which this process ran."""
        while self._looks <= LOOKS:  # the first look may come right after the read began
            await asyncio.sleep(SILENT_S / LOOKS)
            self._looks += 1
        raise TimeoutError(f"nothing was said for {SILENT_S:g} s")
