"""The server's own figures during a run, asked for at a steady pace. Bounded, however long the run."""

import asyncio
from collections.abc import Callable
from typing import Any

from laps_sd.client import Client
from protos.errors import RequestError

EVERY_S = 0.5
MOST = 2000  # samples; then every other one goes, and the pace halves

_FIELDS = ("waiting", "running", "paused", "preemptions", "output_tokens", "num_draft_tokens", "num_accepted_tokens")


class Timeline:
    """`samples`: `t_s` after the start and figures of Stats. `missing`: why there are none, if there are none."""

    def __init__(self) -> None:
        self.samples: list[dict[str, Any]] = []
        self.missing = ""

    async def watch(self, client: Client, clock: Callable[[], float]) -> None:
        """Until cancelled, or Stats cannot be had."""
        every_s = EVERY_S
        while True:
            try:
                stats = await client.stats()
            except RequestError as error:
                self.missing = "" if self.samples else f"{error.code.name}: {error.message}"
                return
            sample = {name: getattr(stats, name) for name in _FIELDS}
            self.samples.append({"t_s": round(clock(), 3), **sample, "queue_lengths": list(stats.queue_lengths)})
            if len(self.samples) >= MOST:
                self.samples = self.samples[::2]
                every_s *= 2
            await asyncio.sleep(every_s)
