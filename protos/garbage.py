"""When Python looks for reference cycles: never for long while requests are live. A search of all objects stops
everything for about 10 ms per thousand live requests. So only new objects are searched, and all of them while no
request is live, or once so much memory has piled up that half of it may be garbage.

Python's own trigger counts objects made less objects freed. A step makes as many as it frees, so that tens of thousands
are new when it fires, and the search takes up to 40 ms. Here new objects are searched every so often instead, the more
often the longer it takes.
"""

import asyncio
import gc
import sys
import time
from collections.abc import Callable

EVERY_S = 0.005  # at least; in a turn or two a busy loop makes some thousand objects
SELDOM_S = 0.04  # at most: each search wakes the loop
SHORT_S, LONG_S = 0.0001, 0.0004  # a search that takes less comes half as often from then on; more, twice as often
LOOK_EVERY = 200  # searches of new objects, after which a search of all is considered
SLACK = 1_000_000  # blocks of memory, some 100 MB, that may pile up beside as many as the last search of all left


async def search(idle: Callable[[], bool]) -> None:
    """Until cancelled. Without live requests (`idle`) a search of all takes next to no time."""
    gc.freeze()  # what was imported stays
    gc.disable()
    kept, searches, pause_s = sys.getallocatedblocks(), 0, EVERY_S
    try:
        while True:
            await asyncio.sleep(pause_s)
            searches += 1
            if searches % LOOK_EVERY == 0 and (idle() or sys.getallocatedblocks() > 2 * kept + SLACK):
                gc.collect()
                kept = sys.getallocatedblocks()
            else:
                begun_s = time.perf_counter()
                gc.collect(0)
                pause_s = _next_pause_s(pause_s, time.perf_counter() - begun_s)
    finally:
        gc.enable()


def _next_pause_s(pause_s: float, took_s: float) -> float:
    """`took_s`: a search of the objects that were new after a pause of `pause_s`."""
    if took_s > LONG_S:
        return max(EVERY_S, pause_s / 2)
    return min(SELDOM_S, 2 * pause_s) if took_s < SHORT_S else pause_s
