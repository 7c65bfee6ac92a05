"""When Python looks for reference cycles: never for long while requests are live. A search of all objects stops
everything for about 10 ms per thousand live requests, so new objects are searched, and all while no request is live.

Python's own trigger counts objects made less objects freed. A step makes as many as it frees, so that tens of thousands
are new when it fires, and the search takes up to 40 ms. Here new objects are searched every so often instead.
"""

import asyncio
import gc
from collections.abc import Callable

EVERY_S = 0.02  # in so long a busy loop makes some thousand objects; a search among them takes well under 1 ms
WHOLE_EVERY = 250  # searches of new objects


async def search(idle: Callable[[], bool]) -> None:
    """Until cancelled. Without live requests a whole search takes next to no time."""
    gc.freeze()  # what was imported stays
    gc.disable()
    searches = 0
    try:
        while True:
            await asyncio.sleep(EVERY_S)
            searches += 1
            gc.collect(2 if searches % WHOLE_EVERY == 0 and idle() else 0)
    finally:
        gc.enable()
