"""A bound on overtaking: who has been passed often enough goes first, in order of arrival. No policy lives here.

**Claim.** Let a request wait for a worker of B slots, with memory for all that run, among those of one tenant. While it
waits, later arrivals of its class are served there at most (c - 1) * W + 2 * B request-rounds, where c is the bound and
W the work ahead of it: the request-rounds that those who were there, and it itself, were believed to need when it came.

**Proof.** It becomes overdue once (c - 1) * W request-rounds of its class were served since it came, to whomever, in
rounds in which it did not run. Those overdue go before all others of their class, the earliest first. So from then on,
whenever it waits, all places that its class gets are taken by overdue requests that came before it. Only what was
decided before is still to come: the round at whose end it became overdue, and with plans a round late the next one, B
request-rounds each at most.

Where memory is short, requests that have not yet been worth their KV go on beside it (`core.kv`), and whoever is
overdue waits for room as well. A late command adds B for each round that it is late; a new scheduler begins to count
anew. W is a belief: a bound in what really came to be served ahead can be kept as well, but costs more
(docs/laboratory.md). Where the backlog is bounded W is at most what waits in a busy hour (core/admission.py). Whoever
is overdue remains so until it ends, so the bound makes nobody thrash.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import inf

from scheduler_service.core.types import Request, RequestClass


class Overtaking:
    """The account of all live requests, in request-rounds. `bound` is c."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self._served: defaultdict[RequestClass, int] = defaultdict(int)
        self._left: dict[str, int] = {}  # rounds that each live request is believed to need still
        self._ahead: defaultdict[RequestClass, int] = defaultdict(int)  # their sum
        self._due: defaultdict[RequestClass, list[tuple[float, str]]] = defaultdict(list)  # heaps: when, in rounds
        self._shared: dict[str, int] = {}  # served rounds in which it ran too, and which its entry in the heap ignores

    def arrived(self, request: Request, left: int, most: float = inf) -> float:
        """`left`: rounds that it is believed to need. Returns the work ahead of it, its own included; of what is more
        than `most` nothing counts."""
        klass = request.klass
        self._left[request.id] = left
        self._ahead[klass] += left
        ahead = min(self._ahead[klass], most)
        self._push(klass, self._served[klass] + (self.bound - 1) * ahead, request.id)
        return ahead

    def _push(self, klass: RequestClass, due: float, id: str) -> None:
        heapq.heappush(self._due[klass], (due, id))
        self._shared[id] = 0

    def served(self, ran: Sequence[tuple[Request, int, int]], beside: Iterable[Request] = ()) -> None:
        """Requests of a worker that ran: the rounds that each is believed to need still, and how many it ran. `beside`:
        others that ran there and are not reported yet."""
        together = Counter(request.klass for request, *_ in ran) + Counter(request.klass for request in beside)
        for request, left, count in ran:
            self._served[request.klass] += count
            self._shared[request.id] += count * together[request.klass]
            self._ahead[request.klass] += left - self._left[request.id]
            self._left[request.id] = left

    def ended(self, request: Request) -> None:
        klass = request.klass
        self._ahead[klass] -= self._left.pop(request.id)
        del self._shared[request.id]
        if len(self._due[klass]) > 2 * len(self._left) + 64:  # ended ones would stay until they are due
            self._due[klass] = [one for one in self._due[klass] if one[1] in self._left]
            heapq.heapify(self._due[klass])

    def overdue(self) -> Iterator[str]:
        """The live requests that have become so since this was asked last."""
        for klass, heap in self._due.items():
            while heap and heap[0][0] <= self._served[klass]:
                due, id = heapq.heappop(heap)
                if shared := self._shared.get(id, 0):
                    self._push(klass, due + shared, id)
                elif id in self._left:
                    yield id
