"""Tenants: weighted shares of service among them, and bounds on what each has waiting. No policy lives here.

A tenant's clock runs by the nominal seconds of a worker that its requests get, over its weight, and whoever is behind
goes first: start-time fair queueing (Goyal, Vin, Cheng 1996) with tenants for flows. Who had nothing to run for a while
comes back at the clock of whoever is furthest behind, so that nothing can be saved up. Clocks are compared in turns of
TURN_S: within a turn the policy alone decides, or tenants would take each other's slots every round. With one tenant
all requests compare equal, and nothing changes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import total_ordering
from heapq import merge
from itertools import islice

from scheduler_service.core.ranking import Key, Ranking
from scheduler_service.core.types import QueueIsFull, Request, RequestClass, Unseen

TURN_S = 0.5  # of a whole worker, at weight 1
TURNS = slice(1, 3)  # of class and tenant, in a key
EVERYBODY_ELSE = "*"


@dataclass(frozen=True, slots=True)
class Terms:
    """A tenant's share, and how much it may have waiting or running: requests, and tokens that those may need."""

    weight: float = 1.0
    max_requests: float = float("inf")
    max_tokens: float = float("inf")
    best_class: RequestClass = RequestClass.INTERACTIVE  # it may ask for better ones, and is served as this


@total_ordering
class Tenant:
    """Part of a key: compares as the tenant stands now. Keys of several tenants are therefore kept apart."""

    __slots__ = ("clock_s", "name", "requests", "tokens", "turn", "weight")

    def __init__(self, name: str) -> None:
        self.name = name
        self.weight = 1.0
        self.clock_s = 0.0
        self.turn = 0
        self.requests = 0  # live
        self.tokens = 0  # that those may need: prompt and output

    def charge(self, service_s: float) -> None:
        """Nominal seconds of a whole worker."""
        self._set(self.clock_s + service_s / self.weight)

    def catch_up(self, clock_s: float) -> None:
        self._set(max(self.clock_s, clock_s))

    def _set(self, clock_s: float) -> None:
        self.clock_s = clock_s
        self.turn = int(clock_s / TURN_S)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tenant) and self.turn == other.turn

    def __lt__(self, other: "Tenant") -> bool:
        return self.turn < other.turn

    __hash__ = object.__hash__


class Tenants:
    """The accounts of all tenants. `terms`: by name; EVERYBODY_ELSE for those who have none of their own."""

    def __init__(self) -> None:
        self.terms: Mapping[str, Terms] = {}
        self._tenants: dict[str, Tenant] = {}
        self._clock_s = 0.0  # nobody who comes starts behind it

    def admit(self, request: Request, unseen: Unseen, room_s: float = 0.0) -> Request:
        """As it is to be served. Raises QueueIsFull, which says `room_s`; changes nothing. `unseen` may be anybody's,
        so all of it is counted."""
        terms, tenant = self._terms(request.tenant), self.find(request.tenant)
        if tenant.requests + unseen.requests >= terms.max_requests:
            raise QueueIsFull(f"{tenant.requests} requests of this tenant are waiting or running", room_s)
        if tenant.tokens + unseen.tokens + request.most_tokens > terms.max_tokens:
            raise QueueIsFull(
                f"requests of this tenant may need {tenant.tokens} tokens, with this one {request.most_tokens} more; "
                f"at most {terms.max_tokens:.0f}",
                room_s,
            )
        return request if request.klass >= terms.best_class else replace(request, klass=terms.best_class)

    def find(self, name: str) -> Tenant:
        """As it stands; one that has no account begins at the present clock."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = Tenant(name)
            tenant.catch_up(self._clock_s)
        return tenant

    def is_owed(self, tenant: Tenant, places: float) -> bool:
        """Whether it has fewer live requests than its share of so many `places`, by weight among who has any."""
        own = self._terms(tenant.name).weight
        others = sum(one.weight for one in self._tenants.values() if one.requests and one is not tenant)
        return bool(others) and tenant.requests < places * own / (own + others)

    def join(self, request: Request) -> Tenant:
        """It is live from now on. Returns whose it is."""
        tenant = self.find(request.tenant)
        if not tenant.requests:
            self._pass_time()
            tenant.catch_up(self._clock_s)
            self._tenants[request.tenant] = tenant
        tenant.weight = self._terms(request.tenant).weight
        tenant.requests += 1
        tenant.tokens += request.most_tokens
        return tenant

    def leave(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        tenant.requests -= 1
        tenant.tokens -= request.most_tokens

    def _pass_time(self) -> None:
        """Who idles and is not ahead is forgotten: it would start at the clock anyway."""
        busy = [tenant.clock_s for tenant in self._tenants.values() if tenant.requests]
        everybody = [tenant.clock_s for tenant in self._tenants.values()]
        self._clock_s = max(self._clock_s, min(busy) if busy else max(everybody, default=0.0))
        self._tenants = {
            name: tenant for name, tenant in self._tenants.items() if tenant.requests or tenant.clock_s > self._clock_s
        }

    def _terms(self, name: str) -> Terms:
        return self.terms.get(name) or self.terms.get(EVERYBODY_ELSE) or Terms()


class FairRanking:
    """One ranking for each class and tenant, read as one: turns may change without a key being moved."""

    __slots__ = ("_length", "_rankings")

    def __init__(self) -> None:
        self._rankings: dict[Key, Ranking] = {}  # none is empty
        self._length = 0

    def add(self, key: Key) -> None:
        ranking = self._rankings.get(key[TURNS])
        if ranking is None:
            ranking = self._rankings[key[TURNS]] = Ranking()
        ranking.add(key)
        self._length += 1

    def remove(self, key: Key) -> None:
        """Raises KeyError if it is not there."""
        ranking = self._rankings[key[TURNS]]
        ranking.remove(key)
        self._length -= 1
        if not len(ranking):
            del self._rankings[key[TURNS]]

    def move(self, old: Key, new: Key) -> None:
        """`new` for `old`, of the same request. Raises KeyError if `old` is not there."""
        if old[TURNS] == new[TURNS]:
            self._rankings[new[TURNS]].move(old, new)
        else:
            self.remove(old)
            self.add(new)

    def first(self, count: int) -> list[Key]:
        """The best `count`, or all if there are fewer."""
        if len(self._rankings) == 1:
            return next(iter(self._rankings.values())).first(count)
        return list(islice(self, count))

    def beyond(self, count: int) -> Iterator[Key]:
        """All but the best `count`, in order."""
        if len(self._rankings) == 1:
            return next(iter(self._rankings.values())).beyond(count)
        return islice(self, count, None)

    def before(self, key: Key) -> int:
        """How many go before `key`."""
        return sum(ranking.before(key) for ranking in self._rankings.values())

    def __iter__(self) -> Iterator[Key]:
        if len(self._rankings) == 1:
            return iter(next(iter(self._rankings.values())))
        return merge(*self._rankings.values())

    def __reversed__(self) -> Iterator[Key]:
        return merge(*map(reversed, self._rankings.values()), reverse=True)

    def __len__(self) -> int:
        return self._length
