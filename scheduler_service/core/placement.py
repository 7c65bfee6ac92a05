"""Which request that waits at one worker is better off at another. The move itself is the core's."""

from itertools import islice
from typing import TYPE_CHECKING

from scheduler_service.core.entry import Entry, Worker
from scheduler_service.core.lifecycle import State

if TYPE_CHECKING:
    from scheduler_service.core.core import Core


def claimable(core: "Core", name: str, batch: list[Entry]) -> Entry | None:
    """The best request that waits at another worker and is better off in the next `batch` of this one: it has no KV
    there and a better claim than the last of the batch; or a slot would idle, and waiting takes longer than computing
    its KV anew."""
    idle = len(batch) < core.workers[name].up.slots
    best = None
    for other, donor in core.workers.items():
        if other == name or donor.vacancy >= 0:
            continue
        for key in islice(donor.ranking, donor.up.slots, None):
            entry = core.entries[key[-1]]
            if (best and key >= best.key) or not (idle or key < batch[-1].key):
                break
            if entry.state is State.RUNNING:
                continue
            rebuild_s = entry.tokens * core.workers[name].up.cost.prefill_token_s
            if not (entry.blocks or entry.offloaded) or (idle and rebuild_s < _next_end_s(core, donor)):
                best = entry
                break
    return best


def _next_end_s(core: "Core", worker: Worker) -> float:
    """Seconds until the first of those that go first there is believed to end."""
    first = (core.entries[key[-1]] for key in worker.ranking.first(worker.up.slots))
    return min(map(core.believed_rounds, first)) * worker.up.cost.round_s(core.draft_len, worker.up.slots)
