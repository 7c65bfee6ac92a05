"""Whether a request may come in: bounds on requests, tokens and work, by class; and whether its deadline can be kept.

**Backlog.** What is admitted waits, by Little's law, for the work that is there before it. Where nobody says how much
that may be, it is the work of BACKLOG mean requests beside those that run. By Kingman's approximation 9 (1 + C^2) / 2
mean requests wait at 0.9 of the capacity, C^2 being the squared coefficient of variation of their work, however many
slots there are, and the tail is exponential: so the bound is met about once in a hundred arrivals there and hardly ever
below, and in a flood everybody waits about as long as the unluckiest do at 0.9. How much a request asks for makes no
difference to whether it is refused.

**Tenants.** The backlog's bound is for all of them, but none is refused for it that has less than its share, by weight,
of the requests that fit: or whoever asks the most often would get all places that become vacant, and fair shares of
service be worth nothing. So k tenants may together have 1 + 1/2 + ... + 1/k times as much.

**Classes.** One waits behind the better ones, but no longer than its least share (core/classes.py) takes to serve what
it has; so a flood of a better class does not lock it out. BATCH has no latency to lose: only requests and tokens bound
it. Of those a worse class may fill less, and each has a part that no other can take.

Decides; keeps no account (core/load.py does), changes nothing.
"""

from dataclasses import dataclass
from math import ceil, exp, inf
from typing import TYPE_CHECKING

from scheduler_service.core import outlook
from scheduler_service.core.classes import LEAST
from scheduler_service.core.entry import Entry
from scheduler_service.core.types import QueueIsFull, Request, RequestClass, TooLate

if TYPE_CHECKING:
    from scheduler_service.core.core import Core

BACKLOG = 40  # mean requests
BUSY = 12  # times what waits in a busy hour is the backlog at its bound
MIN_REQUEST_S = 1e-9
LIMIT = {RequestClass.INTERACTIVE: 0.9, RequestClass.DEFAULT: 0.8, RequestClass.BATCH: 0.5}  # of requests and tokens
KEPT = 0.05  # of them, for each class
SURE = 2.0  # spreads below its median an output hardly ever ends ...
LEARNED = 20  # ... once so many requests have ended; before that it may have a single token, unless the client knows


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may be live at a time. `tokens`: of prompt and output, as many as they may come to. `backlog_s`: seconds
    that their work may take all workers together; None: as BACKLOG says."""

    requests: float = inf
    tokens: float = inf
    backlog_s: float | None = inf


UNBOUNDED = Bounds()


def check(core: "Core", entry: Entry, now: float) -> None:
    """Raises QueueIsFull, TooLate."""
    request, load, unseen, bounds = entry.request, core.load, core.unseen, core.bounds
    own, everybody = load.by_class[request.klass], load.by_class.values()
    live = sum(one.requests for one in everybody) + unseen.requests
    tokens = sum(one.tokens for one in everybody) + unseen.tokens
    for what, mine, of_class, of_all, most in (
        ("requests", 1, own.requests, live, bounds.requests),
        ("tokens", request.most_tokens, own.tokens, tokens, bounds.tokens),
    ):
        kept = of_class + mine <= KEPT * most or of_all + mine <= _whole(LIMIT[request.klass] * most)
        if of_all + mine > most or not kept:
            raise QueueIsFull(f"{of_all} {what} of at most {most:.0f} are waiting or running", request_s(core))
    if core.workers:
        wait_s, most_s = waits_s(core)[request.klass], backlog_bound_s(core)
        if wait_s > most_s and request.klass is not RequestClass.BATCH and not _is_owed(core, entry, most_s):
            room_s = wait_s - most_s + request_s(core)
            raise QueueIsFull(f"{wait_s:.1f} s of work are waiting, of at most {most_s:.1f} s", room_s)
        if request.deadline is not None:
            _check_deadline(core, entry, request.deadline - now)


def _is_owed(core: "Core", entry: Entry, most_s: float) -> bool:
    """A tenant's flood fills its own part of the backlog: it waits for its own turns, and others come in for theirs."""
    return core.tenants.is_owed(entry.tenant, most_s / max(request_s(core), MIN_REQUEST_S))


def _whole(number: float) -> float:
    return number if number == inf else ceil(number)


def request_s(core: "Core") -> float:
    """Seconds that all workers together take for a mean one of the requests that came last; 0 without workers."""
    pace = core.load.pace
    return pace.work_s(core.load.mean_rounds, core.load.mean_prefill) if pace else 0.0


def backlog_bound_s(core: "Core") -> float:
    if core.bounds.backlog_s is not None:
        return core.bounds.backlog_s
    slots = sum(worker.up.slots for worker in core.workers.values())
    return (BACKLOG + slots) * request_s(core)


def busy_rounds(core: "Core") -> float:
    """Request-rounds that wait in a busy hour. Who comes when there are more, in a flood, is not overtaken more often
    for that (core/overtaking.py): by size alone long requests would starve, since short ones never stop coming."""
    pace = core.load.pace
    return backlog_bound_s(core) / BUSY / pace.round_s if pace else inf


def waits_s(core: "Core") -> dict[RequestClass, float]:
    """Seconds until all that each class has is served, with what goes before it; infinite without workers."""
    pace = core.load.pace
    if pace is None:
        return dict.fromkeys(RequestClass, inf)
    before_s = core.unseen.requests * request_s(core)
    waits = {}
    for klass, load in core.load.by_class.items():  # the best first
        own_s = pace.work_s(load.rounds, load.prefill)
        before_s += own_s
        waits[klass] = min(before_s, own_s / LEAST[klass]) if LEAST[klass] else before_s
    return waits


def _check_deadline(core: "Core", entry: Entry, left_s: float) -> None:
    """Refuse what cannot end in time, alone or behind what goes first now, though its output be as short as it may be
    expected. Whoever comes later, and overtakes it, is left out."""
    request = entry.request
    known = core.length.finished >= LEARNED or request.predicted_tokens is not None
    shortest = exp(entry.length.location - SURE * entry.length.spread) if known else 1.0
    alone_s = _alone_s(core, request, shortest)
    if alone_s > left_s:
        raise TooLate(f"{alone_s:.1f} s of work cannot end within {left_s:.1f} s")
    if not known or alone_s + max(waits_s(core).values()) <= left_s:
        return  # whoever goes first
    wait_s = outlook.least_wait_s(core, core.key(entry))
    if alone_s + wait_s > left_s:
        what = f"it would begin after {wait_s:.1f} s at the earliest, and {left_s:.1f} s are left until its deadline"
        raise QueueIsFull(what, alone_s + wait_s - left_s)


def _alone_s(core: "Core", request: Request, tokens: float) -> float:
    """Seconds that so many tokens of output take on the fastest worker if all drafts are accepted."""
    rounds = max(1.0, min(tokens, request.max_tokens) / (core.draft_len + 1))
    ups, live = [worker.up for worker in core.workers.values()], len(core.entries) + 1
    round_s = min(up.cost.round_s(core.draft_len, min(up.slots, live)) for up in ups)
    return rounds * round_s + request.prompt_tokens * min(up.cost.prefill_token_s for up in ups)
