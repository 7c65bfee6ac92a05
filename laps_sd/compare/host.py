"""Whether something else disturbed the machine during a run. What the hypervisor takes is seen on Linux alone."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import psutil

BEAT_S = 0.05
# A run in which one of these is exceeded is repeated.
MOST_STOLEN, MOST_OTHERS, MOST_STALL_S = 0.02, 0.1, 1.0


@dataclass(slots=True)
class Conditions:
    """Shares of the time of all cores during the run: `stolen_share` by the hypervisor, `others_share` by processes
    other than this one and its children. `stall_s`: the longest time that this process's event loop could not run."""

    stolen_share: float = 0.0
    others_share: float = 0.0
    stall_s: float = 0.0

    def faults(self) -> Iterator[str]:
        if self.stolen_share > MOST_STOLEN:
            yield f"the hypervisor took {self.stolen_share:.0%} of the processors"
        if self.others_share > MOST_OTHERS:
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
        whole_s = max(1e-9, (after[2] - before[2]) * psutil.cpu_count())
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


def _processors() -> tuple[float, float]:
    """Seconds of all cores since the machine started: busy, and stolen."""
    times = psutil.cpu_times()
    stolen_s = getattr(times, "steal", 0.0)
    not_busy = sum(getattr(times, name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice"))
    return sum(times) - not_busy - stolen_s, stolen_s  # guests' times are counted in user's, too


def _ours_s() -> float:
    """Processor seconds of this process and its descendants, including those that have ended and were waited for."""
    used_s = 0.0
    for process in (us := psutil.Process(), *us.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            used_s += sum(process.cpu_times()[:4])  # user and system, of itself and of the children it waited for
    return used_s
