"""A bound on overtaking: requests that have been passed often enough go first, in order of arrival. No policy is here.

**Claim.** Let a request wait for a worker of B slots, with memory for all that run, among those of one tenant. While it
waits, later arrivals of its class are served there at most (c - 1) * W + 2 * B request-rounds. Here c is the bound, and
W the work ahead of the request when it came: the request-rounds that it and the live requests of its class were
believed to need.

**Proof.** The request becomes overdue once (c - 1) * W request-rounds of its class were served since it came, whichever
requests got them, in rounds in which it did not run itself. Overdue requests go before all others of their class, the
earliest first. So from then on, whenever it waits, all places that its class gets are taken by overdue requests that
came before it. Only what was decided before that is still to come: the round at whose end it became overdue, and with
plans a round late the next one, B request-rounds each at most.

Where memory is short, requests that have not yet been worth their KV go on (core/kv.py), and an overdue request waits
for room as well. A late command adds B for each round that it is late. A new scheduler begins to count anew. W is a
belief: a bound in the work that is really served ahead could be kept as well, but costs more (DECISIONS.md, 19).
Where the backlog is bounded W is at most what waits in a busy hour (core/backlog.py). An overdue request remains
overdue until it ends, so the bound makes no requests take each other's place again and again.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import ceil, inf

from scheduler_service.core.ranking import Ranking
from scheduler_service.core.types import Request, RequestClass

MANY = 1 << 30  # rounds: no bound


class Overtaking:
    """The account of all live requests, in request-rounds. `bound` is c."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self._served: defaultdict[RequestClass, int] = defaultdict(int)
        self._remaining: dict[str, int] = {}  # rounds that each live request is believed to need still
        self._ahead: defaultdict[RequestClass, int] = defaultdict(int)  # their sum
        self._due: defaultdict[RequestClass, Ranking] = defaultdict(Ranking)  # when, in served rounds, and the id
        self._when: dict[str, float] = {}  # of those there
        self._shared: dict[str, int] = {}  # served rounds in which it ran too, and which its place there ignores

    def arrived(self, request: Request, rounds: int, most: float = inf) -> float:
        """`rounds`: that it is believed to need. Returns the work ahead of it, its own included; of what is more
        than `most` nothing counts."""
        klass = request.klass
        self._remaining[request.id] = rounds
        self._ahead[klass] += rounds
        ahead = min(self._ahead[klass], most)
        self._push(klass, self._served[klass] + (self.bound - 1) * ahead, request.id)
        return ahead

    def _push(self, klass: RequestClass, due: float, id: str) -> None:
        self._due[klass].add((due, id))
        self._when[id], self._shared[id] = due, 0

    def served(self, ran: Sequence[tuple[Request, int, int]], beside: Iterable[Request] = ()) -> None:
        """Requests of a worker that ran: the rounds that each is believed to need still, and how many it ran. `beside`:
        others that ran there and are not reported yet."""
        together: dict[RequestClass, int] = {}  # a Counter takes several times as long
        for request in [*(request for request, *_ in ran), *beside]:
            together[request.klass] = together.get(request.klass, 0) + 1
        known, shared = self._remaining, self._shared
        for request, remaining, count in ran:
            klass, id = request.klass, request.id
            self._served[klass] += count
            shared[id] += count * together[klass]
            if remaining != known[id]:
                self.believed(request, remaining)

    def believed(self, request: Request, rounds: int) -> None:
        """So many rounds the request is believed to need still."""
        self._ahead[request.klass] += rounds - self._remaining[request.id]
        self._remaining[request.id] = rounds

    def served_together(self, klass: RequestClass, served: int) -> None:
        """So many request-rounds of a class were served. Of each request that ran in them `shared` tells."""
        self._served[klass] += served

    def shared(self, request: Request, served: int) -> None:
        """Of the request-rounds that `served_together` tells, so many were in rounds in which it ran itself."""
        self._shared[request.id] += served

    def ended(self, request: Request) -> None:
        klass, id = request.klass, request.id
        self._ahead[klass] -= self._remaining.pop(id)
        del self._shared[id]
        if (due := self._when.pop(id, None)) is not None:
            self._due[klass].remove((due, id))

    def rounds_until_due(self, klass: RequestClass, running: int) -> int:
        """In how many rounds of so many requests of the class, and of no other, certainly nobody becomes overdue."""
        waiting = self._due[klass]
        left = (waiting.best[0] - self._served[klass]) / running if len(waiting) else inf
        return ceil(left) - 1 if left < inf else MANY

    @property
    def is_due(self) -> bool:
        """Whether anybody may have become overdue: `overdue` tells."""
        return any(len(due) and due.best[0] <= self._served[klass] for klass, due in self._due.items())

    def overdue(self) -> Iterator[str]:
        """The live requests that have become so since this was asked last."""
        for klass, waiting in self._due.items():
            while len(waiting) and waiting.best[0] <= self._served[klass]:
                waiting.remove(first := waiting.best)
                due, id = first
                del self._when[id]
                if shared := self._shared[id]:
                    self._push(klass, due + shared, id)
                else:
                    yield id
