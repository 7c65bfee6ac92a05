"""Whether something else disturbed the machine during a run. On systems other than Linux only stalls can be seen."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
BEAT_S = 0.05
# A run in which one of these is exceeded is repeated.
MOST_STOLEN, MOST_OTHERS, MOST_STALL_S = 0.02, 0.1, 1.0


@dataclass(slots=True)
class Conditions:
    """Shares of the time of all cores during the run: `stolen_share` by the hypervisor, `others_share` by processes
    other than this one and its children; None: the system does not say. `stall_s`: the longest time that this process's
    event loop could not run."""

    stolen_share: float | None = None
    others_share: float | None = None
    stall_s: float = 0.0

    def faults(self) -> Iterator[str]:
        if self.stolen_share is not None and self.stolen_share > MOST_STOLEN:
            yield f"the hypervisor took {self.stolen_share:.0%} of the processors"
        if self.others_share is not None and self.others_share > MOST_OTHERS:
            yield f"other processes used {self.others_share:.0%} of the processors"
        if self.stall_s > MOST_STALL_S:
            yield f"everything stood still for {self.stall_s:.1f} s"


@asynccontextmanager
async def watched() -> AsyncIterator[Conditions]:
    """Complete when the block ends. The children must still run then."""
    conditions = Conditions()
    beating = asyncio.create_task(_beat(conditions))
    before = _processors(), _ours_s(), time.monotonic()
    try:
        yield conditions
    finally:
        beating.cancel()
        with suppress(asyncio.CancelledError):
            await beating
        after = _processors(), _ours_s(), time.monotonic()
        if before[0] and after[0]:
            whole_s = max(1e-9, (after[2] - before[2]) * (os.cpu_count() or 1))
            busy_s, stolen_s = (new - old for new, old in zip(after[0], before[0], strict=True))
            conditions.stolen_share = stolen_s / whole_s
            conditions.others_share = max(0.0, busy_s - (after[1] - before[1])) / whole_s


async def _beat(conditions: Conditions) -> None:
    while True:
        began = time.monotonic()
        try:
            await asyncio.sleep(BEAT_S)
        finally:  # also of the last sleep, which is cancelled
            conditions.stall_s = max(conditions.stall_s, time.monotonic() - began - BEAT_S)


def _processors() -> tuple[float, float] | None:
    """Seconds of all cores since the machine started: busy, and stolen."""
    try:
        words = (PROC / "stat").read_text().split("\n", 1)[0].split()
        user, nice, system, _, _, interrupts, soft, stolen = map(int, words[1:9])
    except (OSError, ValueError):
        return None
    tick = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + interrupts + soft) / tick, stolen / tick


def _ours_s() -> float:
    """Processor seconds of this process and its descendants, including those that have ended and were waited for."""
    parents: dict[int, int] = {}
    used: dict[int, int] = {}
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):  # it ended meanwhile
            words = (folder / "stat").read_text().rpartition(")")[2].split()
            pid = int(folder.name)
            parents[pid] = int(words[1])
            used[pid] = sum(map(int, words[11:15]))
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(used.get(pid, 0) for pid in ours) / os.sysconf("SC_CLK_TCK")
