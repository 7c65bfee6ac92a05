"""Tenants: weighted shares of service among them, and bounds on what each has waiting. No policy lives here.

A tenant's virtual time grows by the nominal seconds of a worker that its requests get, over its weight. The tenant
whose virtual time is lowest goes first: start-time fair queueing (Goyal, Vin, Cheng 1996) with tenants for flows. A
tenant that had nothing to run for a while comes back at the virtual time of the tenant that is furthest behind, so that
no claim to service can be saved up. Virtual times are compared in grains of GRAIN_S: within a grain the policy alone
decides, or tenants would take each other's slots every round. With one tenant all requests compare equal, and nothing
changes.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import total_ordering
from heapq import heapify, heappop, heappush, heapreplace, merge
from itertools import chain, islice
from typing import Any

from scheduler_service.core.ranking import Changes, Key, Ranking
from scheduler_service.core.terms import EVERYBODY_ELSE, Terms
from scheduler_service.core.types import QueueIsFull, Request, Unseen

GRAIN_S = 0.5  # of a whole worker, at weight 1
GROUP = slice(1, 3)  # of a key: class and tenant
FEW = 512  # keys, whose order is kept


@total_ordering
class Tenant:
    """Part of a key: compares as the tenant stands now. Keys of several tenants are therefore kept apart."""

    __slots__ = ("_changes", "grain", "name", "requests", "tokens", "virtual_s", "waiting", "weight")

    def __init__(self, name: str, changes: Changes | None = None) -> None:
        """`changes`: where it counts how often its place in the order has changed."""
        self._changes = changes or Changes()
        self.name = name
        self.weight = 1.0
        self.virtual_s = 0.0  # its virtual time; it never goes back
        self.grain = 0  # that virtual time in whole grains
        self.requests = 0  # live
        self.waiting = 0  # of them, without KV on a worker
        self.tokens = 0  # that those may need, of prompt and output

    def charge(self, service_s: float) -> None:
        """Nominal seconds of a whole worker."""
        self._set(self.virtual_s + service_s / self.weight)

    def catch_up(self, virtual_s: float) -> None:
        self._set(max(self.virtual_s, virtual_s))

    def _set(self, virtual_s: float) -> None:
        self.virtual_s = virtual_s
        grain = int(virtual_s / GRAIN_S)
        self._changes.count += grain != self.grain
        self.grain = grain

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tenant) and self.grain == other.grain

    def __lt__(self, other: "Tenant") -> bool:
        return self.grain < other.grain

    __hash__ = object.__hash__


class Tenants:
    """The accounts of all tenants. `terms`: by name; EVERYBODY_ELSE for those who have none of their own."""

    def __init__(self, changes: Changes | None = None) -> None:
        self._changes = changes
        self.terms: Mapping[str, Terms] = {}
        self._tenants: dict[str, Tenant] = {}
        self._virtual_s = 0.0  # a tenant that comes back does not start before it
        self._busy: list[tuple[float, str]] = []  # heap: virtual time, when last looked at, of those with live requests

    def admit(self, request: Request, unseen: Unseen, room_s: float = 0.0) -> Request:
        """As it is to be served. Raises QueueIsFull, which says `room_s`; changes nothing. `unseen` may be anybody's,
        so all of it is counted."""
        terms, tenant = self.terms_of(request.tenant), self.find(request.tenant)
        if tenant.requests + unseen.requests >= terms.max_requests:
            raise QueueIsFull(f"{tenant.requests} requests of this tenant are waiting or running", room_s)
        if tenant.tokens + unseen.tokens + request.most_tokens > terms.max_tokens:
            need = f"{tenant.tokens} tokens, with this one {request.most_tokens} more; at most {terms.max_tokens:.0f}"
            raise QueueIsFull(f"requests of this tenant may need {need}", room_s)
        return request if request.klass >= terms.best_class else replace(request, klass=terms.best_class)

    def find(self, name: str) -> Tenant:
        """As it stands. One without live requests starts where the tenant that is furthest behind was last."""
        tenant = self._tenants.get(name) or Tenant(name, self._changes)
        if not tenant.requests:
            tenant.catch_up(self._virtual_s)
        return tenant

    def waiting(self) -> dict[str, int]:
        return {name: tenant.waiting for name, tenant in self._tenants.items() if tenant.waiting}

    def is_owed(self, tenant: Tenant, places: float) -> bool:
        """Whether it has fewer live requests than its share of so many `places`, by weight among tenants with any."""
        own = self.terms_of(tenant.name).weight
        others = sum(one.weight for one in self._tenants.values() if one.requests and one is not tenant)
        return bool(others) and tenant.requests < places * own / (own + others)

    def join(self, request: Request) -> Tenant:
        """It is live from now on. Returns whose it is."""
        tenant = self.find(request.tenant)
        if not tenant.requests:
            self._pass_time()
            tenant.catch_up(self._virtual_s)
            self._tenants[request.tenant] = tenant
            heappush(self._busy, (tenant.virtual_s, tenant.name))
        tenant.weight = self.terms_of(request.tenant).weight
        tenant.requests += 1
        tenant.tokens += request.most_tokens
        return tenant

    def leave(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        tenant.requests -= 1
        tenant.tokens -= request.most_tokens

    def _pass_time(self) -> None:
        """Find the tenant that is furthest behind. Tenants without live requests that are not ahead of it are forgotten
        by and by: they would start there anyway."""
        busy = self._busy
        while busy:
            seen_s, name = busy[0]
            tenant = self._tenants.get(name)
            if tenant is None or not tenant.requests:
                heappop(busy)
            elif tenant.virtual_s > seen_s:
                heapreplace(busy, (tenant.virtual_s, name))
            else:
                break
        if busy:
            self._virtual_s = max(self._virtual_s, busy[0][0])
        else:
            ahead_s = max((tenant.virtual_s for tenant in self._tenants.values()), default=0.0)
            self._virtual_s = max(self._virtual_s, ahead_s)
        if len(self._tenants) > 2 * len(busy) + 64:
            kept = (one for one in self._tenants.values() if one.requests or one.virtual_s > self._virtual_s)
            self._tenants = {tenant.name: tenant for tenant in kept}
        if len(busy) > 2 * len(self._tenants) + 64:
            self._busy = [(one.virtual_s, one.name) for one in self._tenants.values() if one.requests]
            heapify(self._busy)

    def terms_of(self, name: str) -> Terms:
        return self.terms.get(name) or self.terms.get(EVERYBODY_ELSE) or Terms()


class FairRanking:
    """One ranking for each group of requests, those of a class and tenant, read as one. Virtual times may change
    without a key being moved.

    With few keys the order of all of them is kept until it changes. With many keys, and more groups than keys are asked
    for, `first` looks at the groups with the best heads alone. A head is the best key of its group in plain numbers. It
    is renewed when it is looked at: a group may have changed since, and is marked as `_stale`, or its tenant's virtual
    time may have grown, so that the head stands too far in front. `changes`: those of the classes and tenants.
    """

    __slots__ = ("_changes", "_groups", "_head", "_heads", "_length", "_order", "_order_at", "_stale")

    def __init__(self, changes: Changes | None = None) -> None:
        self._changes = changes
        self._order: list[Key] | None = None  # of all keys, after so many changes:
        self._order_at = 0
        self._groups: dict[Key, Ranking] = {}  # none is empty
        self._length = 0
        self._head: dict[Key, Key] = {}  # of each group, as it stands in `_heads`
        self._heads: dict[Any, Ranking] = {}  # by class
        self._stale: set[Key] = set()

    def add(self, key: Key) -> None:
        name = key[GROUP]
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = Ranking()
        group.add(key)
        self._length += 1
        self._changed(name)

    def remove(self, key: Key) -> None:
        """Raises KeyError if it is not there."""
        name = key[GROUP]
        group = self._groups[name]
        group.remove(key)
        self._length -= 1
        if not len(group):
            del self._groups[name]
        self._changed(name)

    def move(self, old: Key, new: Key) -> None:
        """`new` for `old`, of the same request. Raises KeyError if `old` is not there."""
        if old[1] is new[1] and old[2] is new[2]:
            name = new[GROUP]
            self._groups[name].move(old, new)
            self._changed(name)
        else:
            self.remove(old)
            self.add(new)

    def _changed(self, name: Key) -> None:
        self._order = None
        if self._heads:
            self._stale.add(name)

    def _kept_order(self) -> list[Key] | None:
        """All keys in order; None if they are too many to be put in order at once."""
        if self._changes is None or self._length > FEW:
            return None
        if self._order is None or self._order_at != self._changes.count:
            keys = chain.from_iterable(self._groups.values())
            self._order, self._order_at = sorted(keys, key=_plain), self._changes.count
        return self._order

    def at(self, place: int) -> Key | None:
        """The key that so many others go before; None if there are not as many."""
        if len(self._groups) == 1:
            return next(iter(self._groups.values())).at(place)
        return next(self.beyond(place), None)

    def first(self, count: int) -> list[Key]:
        """The best `count`, or all if there are fewer."""
        if len(self._groups) == 1:
            return next(iter(self._groups.values())).first(count)
        if (order := self._kept_order()) is not None:
            return order[:count]
        return list(islice(_merged(self._with_best_heads(count)), count))

    def _with_best_heads(self, count: int) -> Iterable[Ranking]:
        """Groups that have the best `count` keys among them."""
        if len(self._groups) <= count:
            self._head, self._heads, self._stale = {}, {}, set()
            return self._groups.values()
        if not self._heads:
            self._stale = set(self._groups)
        while True:
            for name in self._stale:
                self._renew_head(name)
            best = [head for heads in self._heads.values() for head in heads.first(count)]
            self._stale = {head[-1] for head in best if head[1] != head[-1][1].grain}
            if not self._stale:
                return [self._groups[head[-1]] for head in best]

    def _renew_head(self, name: Key) -> None:
        """Of the group of that class and tenant."""
        klass, tenant = name
        heads = self._heads.setdefault(klass, Ranking())
        if (old := self._head.pop(name, None)) is not None:
            heads.remove(old)
        if (group := self._groups.get(name)) is not None:
            new, _, _, *rest = group.best
            head = self._head[name] = (new, tenant.grain, *rest, name)
            heads.add(head)

    def beyond(self, count: int) -> Iterator[Key]:
        """All but the best `count`, in order."""
        if len(self._groups) == 1:
            return next(iter(self._groups.values())).beyond(count)
        return islice(self._kept_order() or self, count, None)

    def before(self, key: Key) -> int:
        """How many go before `key`."""
        return sum(group.before(key) for group in self._groups.values())

    def __iter__(self) -> Iterator[Key]:
        if len(self._groups) == 1:
            return iter(next(iter(self._groups.values())))
        return _merged(self._groups.values())

    def __reversed__(self) -> Iterator[Key]:
        if len(self._groups) == 1:
            return reversed(next(iter(self._groups.values())))
        if (order := self._kept_order()) is not None:
            return reversed(order)
        return merge(*map(reversed, self._groups.values()), reverse=True)

    def __len__(self) -> int:
        return self._length


def _merged(groups: Iterable[Ranking]) -> Iterator[Key]:
    """In one order. Compared as plain numbers: the order of classes and tenants as they stand now."""
    plain = [zip(map(_plain, group), group, strict=True) for group in groups]
    return (key for _, key in merge(*plain))


def _plain(key: Key) -> Key:
    return (key[0], not key[1].due, key[1].klass, key[2].grain, key[3:])
