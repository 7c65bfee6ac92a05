"""Classes of requests: the better one goes first, yet none starves another. No policy lives here.

While requests of a class wait it is owed its LEAST share of all service, less what it gets. Once it is owed GRAIN_S
it goes before the better classes, until nothing is owed: strict priority with reservations, by the account of deficit
round robin (Shreedhar, Varghese 1996). Of what a class gets beyond its share no more than GRAIN_S counts against it,
and no more than that is saved up while none of its requests waits. With one class nothing changes.
"""

from collections import Counter
from functools import total_ordering
from math import inf

from scheduler_service.core.lifecycle import State
from scheduler_service.core.ranking import Changes
from scheduler_service.core.types import RequestClass

LEAST = {RequestClass.INTERACTIVE: 0.0, RequestClass.DEFAULT: 0.2, RequestClass.BATCH: 0.05}
GRAIN_S = 0.5  # of all workers


@total_ordering
class ClassAccount:
    """Part of a key: compares as the class stands now. Keys of several classes are therefore kept apart."""

    __slots__ = ("_changes", "due", "in_state", "klass", "live", "owed_s")

    def __init__(self, klass: RequestClass, changes: Changes | None = None) -> None:
        """`changes`: where it counts how often its place in the order has changed."""
        self._changes = changes or Changes()
        self.klass = klass
        self.live = 0  # requests
        self.in_state: Counter[State] = Counter()  # requests, those that have ended among them
        self.owed_s = 0.0  # of service
        self.due = False

    def serve(self, owed_s: float) -> None:
        """`owed_s`: more that it is owed; negative where it got more than that."""
        waits = self.live > self.in_state[State.RUNNING]
        self.owed_s = max(-GRAIN_S, min(self.owed_s + owed_s, inf if waits else GRAIN_S))
        self._set_due(self.owed_s >= GRAIN_S or (self.due and self.owed_s > 0))

    def leave(self) -> None:
        self.live -= 1
        if not self.live:
            self.owed_s = 0.0
            self._set_due(False)

    def _set_due(self, due: bool) -> None:
        self._changes.count += due is not self.due
        self.due = due

    def __eq__(self, other: object) -> bool:
        return self is other

    def __lt__(self, other: "ClassAccount") -> bool:
        return (not self.due, self.klass) < (not other.due, other.klass)

    __hash__ = object.__hash__


class Classes:
    """The accounts of all classes."""

    def __init__(self, changes: Changes | None = None) -> None:
        self._accounts = {klass: ClassAccount(klass, changes) for klass in RequestClass}

    def account(self, klass: RequestClass) -> ClassAccount:
        return self._accounts[klass]

    def in_state(self, state: State) -> dict[RequestClass, int]:
        """How many requests of each class are in this state."""
        return {klass: account.in_state[state] for klass, account in self._accounts.items()}

    def charge(self, klass: RequestClass, service_s: float) -> None:
        """Nominal seconds of all workers that a request of `klass` got."""
        for account in self._accounts.values():
            if account.live:
                account.serve(LEAST[account.klass] * service_s - (service_s if account.klass is klass else 0.0))
