"""Whether a request may come in: bounds on requests, tokens and work, by class; and whether its deadline can be kept.

**Backlog.** No request is admitted while the work before it would take longer than backlog.bound_s. How much a request
itself asks for makes no difference. The reasons for the bound, and for the rules below, are in
docs/explanation/overload.md.

**Tenants.** The bound is for all of them together. A tenant that has less than its share, by weight, of the requests
that fit is not refused for it: else the tenant that asks most often would get all places that become vacant. So k
tenants may together have 1 + 1/2 + ... + 1/k times as much.

**Classes.** A request waits behind the better classes, but no longer than its own class takes with its least share
(core/classes.py): so a flood of a better class does not lock it out. BATCH has no latency to lose: only requests and
tokens bound it. Of those a worse class may fill less, and each class has a part that no other can take.

Decides; keeps no account (core/load.py does), changes nothing.
"""

from math import ceil, exp, inf

from scheduler_service.core import backlog, outlook
from scheduler_service.core.entry import Entry
from scheduler_service.core.fleet import Fleet
from scheduler_service.core.types import QueueIsFull, Request, RequestClass, TooLarge, TooLate

MIN_REQUEST_S = 1e-9
LIMIT = {RequestClass.INTERACTIVE: 0.9, RequestClass.DEFAULT: 0.8, RequestClass.BATCH: 0.5}  # of requests and tokens
KEPT = 0.05  # of them, for each class
SURE = 2.0  # spreads below its median an output hardly ever ends ...
LEARNED = 20  # ... once so many requests have ended; before that it may have a single token, unless the client knows


def check(fleet: Fleet, entry: Entry, now: float) -> None:
    """Whether this request, which is prepared but not live, may come in. Raises QueueIsFull, TooLarge, TooLate."""
    request, bounds = entry.request, fleet.bounds
    own, everybody = fleet.load.by_class[request.klass], fleet.load.by_class.values()
    live = sum(one.requests for one in everybody) + fleet.unseen.requests
    tokens = sum(one.tokens for one in everybody) + fleet.unseen.tokens
    for what, mine, of_class, of_all, most in (
        ("requests", 1, own.requests, live, bounds.requests),
        ("tokens", request.most_tokens, own.tokens, tokens, bounds.tokens),
    ):
        allowed = _whole(LIMIT[request.klass] * most)
        if mine > max(KEPT * most, allowed):
            raise TooLarge(f"{mine} {what}, of at most {allowed:.0f} of its class")
        kept = of_class + mine <= KEPT * most or of_all + mine <= allowed
        if of_all + mine > most or not kept:
            text = f"{of_all} {what} of at most {most:.0f} are waiting or running"
            raise QueueIsFull(text, backlog.request_s(fleet))
    if fleet.workers and (bounds.backlog_s != inf or request.deadline is not None):
        wait_s, most_s = backlog.waits_s(fleet)[request.klass], backlog.bound_s(fleet)
        if wait_s > most_s and request.klass is not RequestClass.BATCH and not _is_owed(fleet, entry, most_s):
            room_s = wait_s - most_s + backlog.request_s(fleet)
            raise QueueIsFull(f"{wait_s:.1f} s of work are waiting, of at most {most_s:.1f} s", room_s)
        if request.deadline is not None:
            _check_deadline(fleet, entry, request.deadline - now)


def _is_owed(fleet: Fleet, entry: Entry, most_s: float) -> bool:
    """Whether its tenant has less than its share of the backlog. A tenant's flood fills its own part only."""
    return fleet.tenants.is_owed(entry.tenant, most_s / max(backlog.request_s(fleet), MIN_REQUEST_S))


def _whole(number: float) -> float:
    return number if number == inf else ceil(number)


def _check_deadline(fleet: Fleet, entry: Entry, time_s: float) -> None:
    """Refuse a request that cannot end within `time_s`, alone or behind what goes first now, even if its output is as
    short as may be expected. Requests that come later, and overtake it, are left out."""
    request = entry.request
    known = fleet.known.length.finished >= LEARNED or request.predicted_tokens is not None
    shortest = exp(entry.length.location - SURE * entry.length.spread) if known else 1.0
    alone_s = _alone_s(fleet, request, shortest)
    if alone_s > time_s:
        raise TooLate(f"{alone_s:.3g} s of work cannot end within {time_s:.3g} s, when its deadline is")
    if not known or alone_s + max(backlog.waits_s(fleet).values()) <= time_s:
        return  # in time, whatever goes first
    wait_s = outlook.least_wait_s(fleet, fleet.key(entry))
    if alone_s + wait_s > time_s:
        what = f"it would begin after {wait_s:.1f} s at the earliest, and {time_s:.1f} s are left until its deadline"
        raise QueueIsFull(what, alone_s + wait_s - time_s)


def _alone_s(fleet: Fleet, request: Request, tokens: float) -> float:
    """Seconds that so many tokens of output take on the fastest worker if all drafts are accepted."""
    rounds = max(1.0, min(tokens, request.max_tokens) / (fleet.draft_len + 1))
    ups, live = [worker.up for worker in fleet.workers.values()], len(fleet.entries) + 1
    round_s = min(up.cost.round_s(fleet.draft_len, min(up.slots, live)) for up in ups)
    return rounds * round_s + request.prompt_tokens * min(up.cost.prefill_token_s for up in ups)
