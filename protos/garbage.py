"""When Python looks for reference cycles: never for long while requests are live. A search of all objects stops
everything for about 10 ms per thousand live requests. So only new objects are searched, and all of them while no
request is live, or once so much memory has piled up that half of it may be garbage.

Python's own trigger counts objects made less objects freed. A step makes as many as it frees, so that tens of thousands
are new when it fires, and the search takes up to 40 ms. Here new objects are searched every so often instead.
"""

import asyncio
import gc
import sys
from collections.abc import Callable

EVERY_S = 0.005  # in a turn or two a busy loop makes some thousand objects; a search of them takes well under 1 ms
SELDOM_S = 0.025  # while few are new: each search wakes the loop
MANY = 700  # new objects
LOOK_EVERY = 200  # searches of new objects, after which a search of all is considered
SLACK = 1_000_000  # blocks of memory, some 100 MB, that may pile up beside as many as the last search of all left


async def search(idle: Callable[[], bool]) -> None:
    """Until cancelled. Without live requests (`idle`) a search of all takes next to no time."""
    gc.freeze()  # what was imported stays
    gc.disable()
    kept, searches, many = sys.getallocatedblocks(), 0, False
    try:
        while True:
            await asyncio.sleep(EVERY_S if many else SELDOM_S)
            searches, many = searches + 1, gc.get_count()[0] > MANY
            if searches % LOOK_EVERY == 0 and (idle() or sys.getallocatedblocks() > 2 * kept + SLACK):
                gc.collect()
                kept = sys.getallocatedblocks()
            else:
                gc.collect(0)
    finally:
        gc.enable()
