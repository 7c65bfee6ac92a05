"""How a scheduler waits for its turn to lead: it watches the leader's commits. It writes nothing, talks to nobody."""

import asyncio

from scheduler_service.store import Pulse, Store, StoreUnavailable

POLLS = 10  # in the time that a leader may be silent
MAX_POLL_S = 0.25  # for one that steps down


class Outranked(Exception):
    """A worker has obeyed a leader of a higher `epoch`. Either that one leads, or the store has lost its epoch."""

    def __init__(self, epoch: int) -> None:
        super().__init__(f"a worker has obeyed a leader of epoch {epoch}")
        self.epoch = epoch


async def turn(store: Store, lease_s: float) -> Pulse:
    """Returns once nobody leads: whoever did has stepped down, or committed nothing for `lease_s`. What was last seen
    goes to Store.lead, which finds out whether it changed since.

    A poll that the store does not answer begins the wait anew: a store that comes back gives the leader, who may have
    to rewrite all of it, as long to be heard of as anybody else. Time is counted in polls of our own: a standby, or a
    whole machine, that stood still for a while has seen nothing of it.
    """
    pause_s = min(lease_s / POLLS, MAX_POLL_S)
    seen, silent_s = None, 0.0
    while True:
        try:
            pulse = await store.pulse()
        except StoreUnavailable:
            seen = None
        else:
            if pulse.epoch and pulse.commit is None:
                return pulse
            silent_s = silent_s + pause_s if pulse == seen else 0.0
            seen = pulse
            if silent_s >= lease_s:
                return pulse
        await asyncio.sleep(pause_s)
