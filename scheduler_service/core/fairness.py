"""Tenants: weighted shares of service among them, and bounds on what each has waiting. No policy lives here.

A tenant's virtual time grows by the nominal seconds of a worker that its requests get, over its weight. The tenant
whose virtual time is lowest goes first: start-time fair queueing (Goyal, Vin, Cheng 1996) with tenants for flows. A
tenant that had nothing to run for a while comes back at the virtual time of the tenant that is furthest behind, so that
no claim to service can be saved up. Virtual times are compared in grains of GRAIN_S: within a grain the policy alone
decides, or tenants would take each other's slots every round. With one tenant all requests compare equal, and nothing
changes.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import total_ordering
from heapq import heapify, heappop, heappush, heapreplace

from scheduler_service.core.ranking import Changes
from scheduler_service.core.terms import EVERYBODY_ELSE, Terms
from scheduler_service.core.types import QueueIsFull, Request, Unseen

GRAIN_S = 0.5  # of a whole worker, at weight 1


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
