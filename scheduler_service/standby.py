"""How a scheduler waits until it may lead: it watches the leader's commits. It writes nothing and talks to nobody."""

import asyncio

import structlog

from scheduler_service.store import Pulse, Store, StoreUnavailable, WrongType

POLLS = 10  # in the time that a leader may be silent
MAX_POLL_S = 0.25  # so that a leader that steps down is replaced soon


class HigherEpoch(Exception):
    """A worker has obeyed a leader of a higher `epoch`. Either that one leads, or the store has lost its epoch."""

    def __init__(self, epoch: int) -> None:
        super().__init__(f"a worker has obeyed a leader of epoch {epoch}")
        self.epoch = epoch


async def wait_to_lead(store: Store, lease_s: float) -> Pulse:
    """Returns once nobody leads: the leader has stepped down, or committed nothing for `lease_s`. The pulse that was
    seen last goes to Store.lead, which finds out whether it changed since.

    When the store does not answer a poll the wait begins anew: after an outage the leader may have to rewrite
    everything, and gets `lease_s` to be heard of. Time is counted in polls of our own: a standby that stood still for a
    while, alone or with its whole machine, has not seen the leader be silent. Raises WrongType.
    """
    pause_s = min(lease_s / POLLS, MAX_POLL_S)
    seen, silent_s, trouble = None, 0.0, ""
    while True:
        try:
            pulse = await store.pulse()
        except WrongType:
            raise
        except StoreUnavailable as error:
            if str(error) != trouble:
                trouble = str(error)
                structlog.get_logger().warning("store_unavailable", error=trouble)
            seen = None
        else:
            trouble = ""
            if pulse.epoch and pulse.commit is None:
                return pulse
            silent_s = silent_s + pause_s if pulse == seen else 0.0
            seen = pulse
            if silent_s >= lease_s:
                return pulse
        await asyncio.sleep(pause_s)
