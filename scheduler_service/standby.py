"""How a scheduler waits for its turn to lead: it watches the leader's commits. It writes nothing, talks to nobody."""

import asyncio

from scheduler_service.store import Pulse, Store, StoreUnavailable

POLLS = 10  # in the time that a leader may be silent
MAX_POLL_S = 0.25  # for one that steps down


async def turn(store: Store, lease_s: float) -> Pulse:
    """Returns once nobody leads: whoever did has stepped down, or committed nothing for `lease_s`. What was last seen
    goes to Store.lead, which finds out whether it changed since.

    The time counts from when the store last said something new, or could not be reached: a store that comes back gives
    the leader, who may have to rewrite all of it, as long to be heard of as anybody else. No clock but ours is asked.
    """
    clock = asyncio.get_running_loop().time
    seen, since = None, clock()
    while True:
        try:
            pulse = await store.pulse()
        except StoreUnavailable:
            seen = None
        else:
            if pulse.epoch and pulse.commit is None:
                return pulse
            if pulse != seen:
                seen, since = pulse, clock()
            elif clock() - since >= lease_s:
                return pulse
        await asyncio.sleep(min(lease_s / POLLS, MAX_POLL_S))
