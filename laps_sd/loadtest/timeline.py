"""The server's own figures during a run, asked for at regular times. Their number is bounded, however long the run."""

import asyncio
from collections.abc import Callable
from typing import Any

from grpc import StatusCode

from laps_sd.client import AsyncClient, RequestError

EVERY_S = 0.5
PASSING = (StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED)  # of a server that is busy or starts again
MOST = 2000  # samples; then every other one is dropped, and they are taken half as often

_FIELDS = ("waiting", "running", "paused", "preemptions", "output_tokens", "num_draft_tokens", "num_accepted_tokens")


class Timeline:
    """`samples`: time after the start (`t_s`) and figures of Stats. `missing`: why the last ones are not there, if they
    are not."""

    def __init__(self) -> None:
        self.samples: list[dict[str, Any]] = []
        self.missing = ""

    async def watch(self, client: AsyncClient, clock: Callable[[], float]) -> None:
        """Samples until it is cancelled or the server refuses Stats; while it cannot answer there are none. `clock`:
        seconds after the start."""
        every_s = EVERY_S
        while True:
            try:
                stats = await client.stats()
            except RequestError as error:
                self.missing = f"{error.code.name}: {error.message}"
                if error.code not in PASSING:
                    return
                await asyncio.sleep(every_s)
                continue
            self.missing = ""
            sample = {name: getattr(stats, name) for name in _FIELDS}
            self.samples.append({"t_s": round(clock(), 3), **sample, "queue_lengths": list(stats.queue_lengths)})
            if len(self.samples) >= MOST:
                self.samples = self.samples[::2]
                every_s *= 2
            await asyncio.sleep(every_s)
