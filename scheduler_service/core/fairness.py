"""Tenants: weighted shares of service among them, and bounds on what each has waiting. No policy lives here.

The requests of a tenant in one class are a flow. Its virtual time grows by the nominal seconds of all workers that they
get, over the tenant's weight. Of the flows of a class the one whose virtual time is lowest goes first: start-time fair
queueing (Goyal, Vin, Cheng 1996). A flow that had nothing to run for a while comes back at the virtual time of the flow
of its class that is furthest behind, so that no claim to service can be saved up. Each class has a virtual time of its
own: in a class that hardly gets anything it hardly moves, and whoever started there would go before all others of a
better class. Virtual times are compared in grains of GRAIN_S: within a grain the policy alone decides, or tenants would
take each other's slots every round. With one tenant all requests compare equal, and nothing changes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import total_ordering
from heapq import heapify, heappop, heappush, heapreplace

from scheduler_service.core.ranking import Changes
from scheduler_service.core.terms import EVERYBODY_ELSE, Terms
from scheduler_service.core.types import QueueIsFull, Request, RequestClass, TooLarge, Unseen

GRAIN_S = 0.5  # of all workers, at weight 1


@total_ordering
class Flow:
    """Part of a key: compares as the flow stands now. Keys of several flows are therefore kept apart."""

    __slots__ = ("_changes", "grain", "live", "name", "virtual_s", "weight")

    def __init__(self, name: str, changes: Changes | None = None) -> None:
        """`name`: the tenant's. `changes`: where it counts how often its place in the order has changed."""
        self._changes = changes or Changes()
        self.name = name
        self.weight = 1.0
        self.virtual_s = 0.0  # its virtual time; it never goes back
        self.grain = 0  # that virtual time in whole grains
        self.live = 0  # requests

    def charge(self, service_s: float) -> None:
        """Nominal seconds of all workers."""
        self._set(self.virtual_s + service_s / self.weight)

    def catch_up(self, virtual_s: float) -> None:
        self._set(max(self.virtual_s, virtual_s))

    def _set(self, virtual_s: float) -> None:
        self.virtual_s = virtual_s
        grain = int(virtual_s / GRAIN_S)
        self._changes.count += grain != self.grain
        self.grain = grain

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Flow) and self.grain == other.grain

    def __lt__(self, other: "Flow") -> bool:
        return self.grain < other.grain

    __hash__ = object.__hash__


class Flows:
    """The flows of one class."""

    def __init__(self, changes: Changes | None) -> None:
        self._changes = changes
        self._flows: dict[str, Flow] = {}  # by tenant
        self._virtual_s = 0.0  # a flow that comes back does not start before it
        self._busy: list[tuple[float, str]] = []  # heap: virtual time, when last looked at, of those with live requests

    def find(self, tenant: str) -> Flow:
        """As it stands. One without live requests starts where the flow that is furthest behind was last."""
        flow = self._flows.get(tenant) or Flow(tenant, self._changes)
        if not flow.live:
            flow.catch_up(self._virtual_s)
        return flow

    def join(self, tenant: str, weight: float) -> Flow:
        """One more of its requests is live."""
        flow = self.find(tenant)
        if not flow.live:
            self._pass_time()
            flow.catch_up(self._virtual_s)
            self._flows[tenant] = flow
            heappush(self._busy, (flow.virtual_s, tenant))
        flow.weight = weight
        flow.live += 1
        return flow

    def leave(self, tenant: str) -> None:
        self._flows[tenant].live -= 1

    def _pass_time(self) -> None:
        """Find the flow that is furthest behind. Flows without live requests that are not ahead of it are forgotten by
        and by: they would start there anyway."""
        busy = self._busy
        while busy:
            seen_s, name = busy[0]
            flow = self._flows.get(name)
            if flow is None or not flow.live:
                heappop(busy)
            elif flow.virtual_s > seen_s:
                heapreplace(busy, (flow.virtual_s, name))
            else:
                break
        if busy:
            self._virtual_s = max(self._virtual_s, busy[0][0])
        else:
            ahead_s = max((flow.virtual_s for flow in self._flows.values()), default=0.0)
            self._virtual_s = max(self._virtual_s, ahead_s)
        if len(self._flows) > 2 * len(busy) + 64:
            kept = (flow for flow in self._flows.values() if flow.live or flow.virtual_s > self._virtual_s)
            self._flows = {flow.name: flow for flow in kept}
        if len(busy) > 2 * len(self._flows) + 64:
            self._busy = [(flow.virtual_s, flow.name) for flow in self._flows.values() if flow.live]
            heapify(self._busy)


@dataclass(slots=True)
class Tenant:
    """Counts of one tenant, over all classes."""

    name: str
    weight: float = 1.0
    requests: int = 0  # live
    waiting: int = 0  # of them, without KV on a worker
    tokens: int = 0  # that the live ones may need, of prompt and output


class Tenants:
    """The accounts of all tenants. `terms`: by name; EVERYBODY_ELSE for those who have none of their own."""

    def __init__(self, changes: Changes | None = None) -> None:
        self.terms: Mapping[str, Terms] = {}
        self._tenants: dict[str, Tenant] = {}  # those with live requests
        self._flows = {klass: Flows(changes) for klass in RequestClass}

    def admit(self, request: Request, unseen: Unseen, room_s: float = 0.0) -> Request:
        """As it is to be served. Raises QueueIsFull, which says `room_s`, and TooLarge; changes nothing. `unseen` may
        be anybody's, so all of it is counted."""
        terms, tenant = self.terms_of(request.tenant), self.find(request.tenant)
        if request.most_tokens > terms.max_tokens:
            raise TooLarge(f"{request.most_tokens} tokens, of at most {terms.max_tokens:.0f} of this tenant")
        if tenant.requests + unseen.requests >= terms.max_requests:
            text = f"{tenant.requests} requests of this tenant are waiting or running"
            raise QueueIsFull(text, room_s, of_tenant=True)
        if tenant.tokens + unseen.tokens + request.most_tokens > terms.max_tokens:
            need = f"{tenant.tokens} tokens, with this one {request.most_tokens} more; at most {terms.max_tokens:.0f}"
            raise QueueIsFull(f"requests of this tenant may need {need}", room_s, of_tenant=True)
        return request if request.klass >= terms.best_class else replace(request, klass=terms.best_class)

    def find(self, name: str) -> Tenant:
        return self._tenants.get(name) or Tenant(name)

    def flow(self, request: Request) -> Flow:
        """The flow of this request, as it stands now."""
        return self._flows[request.klass].find(request.tenant)

    def waiting(self) -> dict[str, int]:
        return {name: tenant.waiting for name, tenant in self._tenants.items() if tenant.waiting}

    def is_owed(self, tenant: Tenant, places: float) -> bool:
        """Whether it has fewer live requests than its share of so many `places`, by weight among tenants with any."""
        own = self.terms_of(tenant.name).weight
        others = sum(one.weight for one in self._tenants.values() if one.requests and one is not tenant)
        return bool(others) and tenant.requests < places * own / (own + others)

    def join(self, request: Request) -> tuple[Tenant, Flow]:
        """It is live from now on. Returns whose it is."""
        tenant = self._tenants.setdefault(request.tenant, self.find(request.tenant))
        tenant.weight = self.terms_of(request.tenant).weight
        tenant.requests += 1
        tenant.tokens += request.most_tokens
        return tenant, self._flows[request.klass].join(request.tenant, tenant.weight)

    def leave(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        tenant.requests -= 1
        tenant.tokens -= request.most_tokens
        if not tenant.requests:
            del self._tenants[request.tenant]
        self._flows[request.klass].leave(request.tenant)

    def terms_of(self, name: str) -> Terms:
        return self.terms.get(name) or self.terms.get(EVERYBODY_ELSE) or Terms()
