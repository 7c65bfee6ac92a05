"""How much work waits, how fast it is done, and how much may wait. Refuses nothing: core/admission.py does.

The bound on the backlog follows from queueing theory: docs/explanation/overload.md.
"""

from math import inf

from laps_sd_vllm._core.scheduler_service.core.classes import LEAST
from laps_sd_vllm._core.scheduler_service.core.fleet import Fleet
from laps_sd_vllm._core.scheduler_service.core.types import RequestClass

BACKLOG = 40  # mean requests that may wait beside those that run, where nobody says how much
BUSY = 12  # times what waits in a busy hour is the backlog at its bound


def request_s(fleet: Fleet) -> float:
    """Seconds that all workers together take for a mean one of the requests that came last; 0 without workers."""
    pace = fleet.load.pace
    return pace.work_s(fleet.load.mean_rounds, fleet.load.mean_prefill) if pace else 0.0


def bound_s(fleet: Fleet) -> float:
    """Seconds of work that may be live."""
    if fleet.bounds.backlog_s is not None:
        return fleet.bounds.backlog_s
    return (BACKLOG + fleet.slots) * request_s(fleet)


def busy_rounds(fleet: Fleet) -> float:
    """Request-rounds that wait in a busy hour.

    A request that comes when more than that waits, in a flood, is not overtaken more often for it (core/overtaking.py).
    By size alone long requests would starve, since short ones never stop coming.
    """
    pace = fleet.load.pace
    return bound_s(fleet) / BUSY / pace.round_s if pace else inf


def waits_s(fleet: Fleet) -> dict[RequestClass, float]:
    """Seconds until all that each class has is served, with what goes before it; infinite without workers."""
    pace = fleet.load.pace
    if pace is None:
        return dict.fromkeys(RequestClass, inf)
    before_s = fleet.unseen.requests * request_s(fleet)
    waits = {}
    for klass, load in fleet.load.by_class.items():  # the best first
        own_s = pace.work_s(load.rounds, load.prefill)
        before_s += own_s
        waits[klass] = min(before_s, own_s / LEAST[klass]) if LEAST[klass] else before_s
    return waits
