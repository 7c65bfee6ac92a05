"""What else went on on this machine during a run: a run that was disturbed measures the disturbance. Linux tells most
of it; elsewhere only stalls are seen. Nothing is judged but here."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
BEAT_S = 0.05
# Beyond these a run is repeated.
MOST_STOLEN, MOST_OTHERS, MOST_STALL_S = 0.02, 0.1, 1.0


@dataclass(slots=True)
class Conditions:
    """Shares are of all cores over the run: time that a hypervisor took, and that processes other than ours and our
    children used; None: the system does not tell. `stall_s`: the longest that our event loop did not get to run."""

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
    """Complete when the block ends, which must be while our children still run."""
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
        finally:  # the last one is cut short, perhaps after a standstill
            conditions.stall_s = max(conditions.stall_s, time.monotonic() - began - BEAT_S)


def _processors() -> tuple[float, float] | None:
    """Seconds of all cores so far: busy, and stolen."""
    try:
        words = (PROC / "stat").read_text().split("\n", 1)[0].split()
        user, nice, system, _, _, interrupts, soft, stolen = map(int, words[1:9])
    except (OSError, ValueError):
        return None
    tick = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + interrupts + soft) / tick, stolen / tick


def _ours_s() -> float:
    """Processor seconds of this process and of those below it, ended ones that were waited for included."""
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
