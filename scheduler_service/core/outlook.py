"""Where live requests stand and how long they still wait, for people and for deadlines. Decides and changes nothing."""

import heapq
from collections.abc import Sequence
from itertools import accumulate, islice
from typing import TYPE_CHECKING

from scheduler_service.core.lifecycle import State
from scheduler_service.core.ranking import Key

if TYPE_CHECKING:
    from scheduler_service.core.core import Core

SAMPLE = 256  # of those that go first, whose work is added up; further ones are taken to be like them
FEW = 64  # the same where every submission may ask
AT_LEAST = 0.5  # of a wait as it is estimated


def best(core: "Core", count: int) -> list[str]:
    """The ids of up to `count` live requests: those that run or are paused, then those that wait, each by claim."""
    begun = [entry for entry in core.entries.values() if entry.state is not State.WAITING]
    ids = [entry.request.id for entry in heapq.nsmallest(count, begun, key=lambda entry: entry.key)]
    first = (core.entries[key[-1]] for key in heapq.merge(*core.rankings()))
    waiting = (entry.request.id for entry in first if entry.state is State.WAITING)
    return [*ids, *islice(waiting, count - len(ids))]


def position(core: "Core", id: str) -> int:
    """How many live requests go before it, wherever they are placed."""
    key = core.entries[id].key
    return sum(ranking.before(key) for ranking in core.rankings())


def waits_s(core: "Core", ids: Sequence[str]) -> list[float]:
    """Estimated seconds until each of `ids` runs: the work of those before it, shared by all slots."""
    return _waits_s(core, [0 if core.entries[id].state is State.RUNNING else position(core, id) for id in ids], SAMPLE)


def least_wait_s(core: "Core", key: Key) -> float:
    """Seconds that a request that would get `key` waits, hardly ever less. Of those before it as many as there are
    slots may be about to end."""
    ahead = sum(ranking.before(key) for ranking in core.rankings())
    slots = sum(worker.up.slots for worker in core.workers.values())
    return AT_LEAST * _waits_s(core, [ahead], FEW)[0] * (ahead - slots) / ahead if ahead > slots else 0.0


def _waits_s(core: "Core", ahead: Sequence[int], most: int) -> list[float]:
    """For requests that have so many others before them. The work of up to `most` is added up."""
    slots = sum(worker.up.slots for worker in core.workers.values())
    if not slots:
        return [0.0] * len(ahead)
    sample = min(max(ahead, default=0), most)
    first = islice(heapq.merge(*core.rankings()), sample)
    work_s = list(accumulate((remaining_s(core, key[-1]) for key in first), initial=0.0))
    return [n * work_s[min(n, sample)] / min(n, sample) / slots if n >= slots else 0.0 for n in ahead]


def remaining_s(core: "Core", id: str) -> float:
    """Seconds that it still needs, by the estimate of LAPS-SD at the present costs of its worker, or of any.
    0 without workers."""
    entry = core.entries[id]
    worker = core.workers.get(entry.home or "", next(iter(core.workers.values()), None))
    if worker is None:
        return 0.0
    left = max(1, predicted_tokens(core, id) - entry.emitted)
    rounds = left / (entry.acceptance.per_round(core.acceptance.per_round, weight=1) + 1)
    cost = worker.up.cost
    return rounds * cost.round_s(core.draft_len, worker.up.slots) + entry.prefill_owed * cost.prefill_token_s


def predicted_tokens(core: "Core", id: str) -> int:
    """Of its output in all, as believed now."""
    entry = core.entries[id]
    request = entry.request
    predicted = core.length.predict(request.predicted_tokens, request.max_tokens, request.expected)
    return max(predicted, entry.emitted)
