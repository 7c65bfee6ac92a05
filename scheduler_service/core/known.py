"""What all claims are reckoned from: nominal costs of a round, and what finished requests taught. Holds no request."""

from scheduler_service.core.beliefs import FleetAcceptance, FleetLength, Length
from scheduler_service.core.costs import CostProfile
from scheduler_service.core.probed import FleetProbe
from scheduler_service.core.types import Request


class Known:
    """One profile of costs serves for all requests: that of the first worker. It never changes after that, so that
    claims made at different times can be compared; those made before it are made anew (core/refit.py). `draft_len`:
    drafts a round in which service is counted."""

    def __init__(self, draft_len: int) -> None:
        self.draft_len = draft_len
        self.length = FleetLength()
        self.acceptance = FleetAcceptance.at(draft_len)
        self.probe = FleetProbe()
        self.cost = CostProfile()
        self.slots = 1  # of the worker that these costs are from
        self.round_s = self.cost.round_s(draft_len, 1)  # nominal seconds of a round of a full batch
        self._by_default = True
        self._usual: tuple[FleetLength, int, Length] | None = None  # as in `belief`, and since when

    def forget(self) -> None:
        """Requests and workers of another model taught it."""
        self._by_default = True
        self.length, self.probe = FleetLength(), FleetProbe()
        self.acceptance = FleetAcceptance.at(self.draft_len)

    def first_worker(self, cost: CostProfile, slots: int) -> bool:
        """A worker has come with these costs and slots. Nothing changes unless it is the first one, which is told."""
        first, self._by_default = self._by_default, False
        if first:
            self.cost, self.slots = cost, slots
            self.round_s = cost.round_s(self.draft_len, slots)
        return first

    def belief(self, request: Request) -> Length:
        """Of its length. Requests of whose length nothing is known share one belief until another has finished."""
        expected = request.expected
        if request.predicted_tokens is not None or (expected is not None and expected.length is not None):
            return self.length.belief(request.predicted_tokens, request.expected)
        known, finished = self.length, self.length.finished
        if self._usual is None or self._usual[0] is not known or self._usual[1] != finished:
            self._usual = known, finished, known.belief(None)
        return self._usual[2]

    @property
    def tokens_per_round(self) -> float:
        """Output tokens in a round, as finished requests had them."""
        return self.acceptance.per_round + 1
