"""When Python looks for reference cycles: never for long while requests are live. A whole search stops everything for
about 10 ms per thousand live requests."""

import asyncio
import gc
from collections.abc import Callable

YOUNG = 2_000  # objects: a search among so many new ones takes about 1 ms
NEVER = 10**9
IDLE_CHECK_S = 5.0
MANY = 50  # searches of new objects, until a whole one is due


def only_young_objects() -> None:
    """From now on Python itself searches only new objects. A step leaves no cycles behind; a connection or an error
    leaves a few, which are mostly found while they are new."""
    gc.freeze()  # what was imported stays
    gc.set_threshold(YOUNG, NEVER, NEVER)


async def search_all_when_idle(idle: Callable[[], bool]) -> None:
    """Until cancelled. Without live requests a whole search takes next to no time."""
    while True:
        await asyncio.sleep(IDLE_CHECK_S)
        if gc.get_count()[1] >= MANY and idle():
            gc.collect()
