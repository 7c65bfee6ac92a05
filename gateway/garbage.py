"""When Python looks for reference cycles. A search through all objects stops every stream for some 70 ms per thousand
live streams, so Python itself searches only new objects, and `search_all_when_cheap` the others."""

import asyncio
import gc
from collections.abc import Callable

YOUNG = 2_000  # objects: a search among so many new ones takes about 1 ms
NEVER = 10**9
CHECK_S = 5.0
FEW_STREAMS = 20  # a whole search takes some 2 ms then
MANY = 10  # searches of new objects, after which a whole one pays
TOO_MANY = 250  # the same, however many streams there are: half a million objects may be garbage by now


def search_young_objects_only() -> None:
    gc.collect()
    gc.freeze()  # what was imported stays
    gc.set_threshold(YOUNG, NEVER, NEVER)


async def search_all_when_cheap(live: Callable[[], int]) -> None:
    """Until cancelled. `live`: how many streams there are."""
    while True:
        await asyncio.sleep(CHECK_S)
        if gc.get_count()[1] >= (MANY if live() <= FEW_STREAMS else TOO_MANY):
            gc.collect()
