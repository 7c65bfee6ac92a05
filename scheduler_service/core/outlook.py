"""Where live requests stand and how long they still wait, for people and for deadlines. Decides and changes nothing."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice

from scheduler_service.core import front
from scheduler_service.core.fleet import Fleet
from scheduler_service.core.lifecycle import State
from scheduler_service.core.ranking import Key

SAMPLE = 256  # requests that go first, whose work is added up; further ones are taken to be like them
FEW = 64  # the same where every submission may ask
AT_LEAST = 0.5  # of a wait as it is estimated


def in_order(fleet: Fleet, at_once: int) -> Iterator[list[str]]:
    """The ids of the live requests: those that run or are paused, then those that wait, each by claim. They come in
    pieces, some empty, and for each no more than `at_once` requests are looked at. If the fleet changes meanwhile, some
    may be missing and some come twice."""
    entries, begun = iter(list(fleet.entries.values())), []
    while some := list(islice(entries, at_once)):
        begun.append(front.in_order([one.key for one in some if one.key and one.state is not State.WAITING]))
        yield []
    ordered = front.merged(begun)
    while keys := list(islice(ordered, at_once)):
        yield [key[-1] for key in keys]
    ordered = front.merged(fleet.rankings())
    while keys := list(islice(ordered, at_once)):
        found = (fleet.entries.get(key[-1]) for key in keys)
        yield [one.request.id for one in found if one is not None and one.state is State.WAITING]


def position(fleet: Fleet, id: str) -> int:
    """How many live requests go before it, wherever they are placed."""
    key = fleet.entries[id].key
    return sum(ranking.before(key) for ranking in fleet.rankings())


def waits_s(fleet: Fleet, ids: Sequence[str]) -> list[float]:
    """Estimated seconds until each of `ids` runs: the work of those before it, shared by all slots."""
    ahead = [0 if fleet.entries[id].state is State.RUNNING else position(fleet, id) for id in ids]
    return waits_behind_s(fleet, ahead)


def waits_behind_s(fleet: Fleet, ahead: Sequence[int]) -> list[float]:
    """The same of requests that have, or had just now, so many others before them."""
    return _waits_s(fleet, ahead, SAMPLE)


def least_wait_s(fleet: Fleet, key: Key) -> float:
    """Seconds that a request with this `key` would wait, hardly ever less. Of those before it as many as there are
    slots may be about to end."""
    ahead, slots = sum(ranking.before(key) for ranking in fleet.rankings()), fleet.slots
    return AT_LEAST * _waits_s(fleet, [ahead], FEW)[0] * (ahead - slots) / ahead if ahead > slots else 0.0


def _waits_s(fleet: Fleet, ahead: Sequence[int], most: int) -> list[float]:
    """For requests that have so many others before them. The work of up to `most` is added up."""
    slots = fleet.slots
    if not slots:
        return [0.0] * len(ahead)
    first = islice(front.merged(fleet.rankings()), min(max(ahead, default=0), most))
    work_s = list(accumulate((remaining_s(fleet, key[-1]) for key in first), initial=0.0))
    sample = len(work_s) - 1  # less than were asked for if requests have ended since their places were looked up
    return [n * work_s[min(n, sample)] / min(n, sample) / slots if sample and n >= slots else 0.0 for n in ahead]


def remaining_s(fleet: Fleet, id: str) -> float:
    """Seconds that it still needs, by the estimate of LAPS-SD at the present costs of its worker, or of any.
    0 without workers."""
    entry = fleet.entries[id]
    worker = fleet.workers.get(entry.home or "", next(iter(fleet.workers.values()), None))
    if worker is None:
        return 0.0
    tokens = max(1, entry.predicted_tokens - entry.emitted)
    rounds = tokens / (entry.acceptance.per_round(fleet.known.acceptance.per_round, weight=1) + 1)
    cost = worker.up.cost
    return rounds * cost.round_s(fleet.draft_len, worker.up.slots) + entry.prefill_owed * cost.prefill_token_s
