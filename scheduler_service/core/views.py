"""What a policy sees of a request, from all that the core knows of it. Decides nothing."""

from typing import TYPE_CHECKING

from scheduler_service.core.beliefs import Acceptance, Length
from scheduler_service.core.entry import Entry
from scheduler_service.core.lifecycle import State
from scheduler_service.core.types import Request

if TYPE_CHECKING:
    from scheduler_service.core.core import Core


class EntryView:
    """`types.View` of one entry. Each part is worked out when a policy asks for it: of most rows of a report it asks
    for three or four."""

    __slots__ = ("_core", "_entry", "request")

    def __init__(self, core: "Core", entry: Entry) -> None:
        self._core, self._entry = core, entry
        self.request: Request = entry.request

    @property
    def emitted(self) -> int:
        return self._entry.emitted

    @property
    def acceptance(self) -> Acceptance:
        return self._entry.acceptance

    @property
    def perceptible(self) -> bool:
        return self._entry.perceptible

    @property
    def length(self) -> Length:
        return self._entry.length

    @property
    def left_tokens(self) -> float:
        return self._entry.left_tokens

    @property
    def attained_s(self) -> float:
        return self._entry.rounds * self._core.round_s + self._entry.prefilled * self._core.cost.prefill_token_s

    @property
    def predicted_tokens(self) -> int:
        request = self.request
        predicted = self._core.length.predict(request.predicted_tokens, request.max_tokens, request.expected)
        return max(predicted, self._entry.emitted)

    @property
    def prefill_s(self) -> float:
        return self.request.prompt_tokens * self._core.cost.prefill_token_s

    @property
    def prior_accepted(self) -> float:
        expected, fleet = self.request.expected, self._core.acceptance
        if expected is None or expected.acceptance is None:
            return fleet.per_round
        return expected.acceptance * fleet.drafts_per_round

    @property
    def resume_s(self) -> float:
        entry, cost = self._entry, self._core.cost
        back_s = cost.resume_s if entry.state is State.PAUSED else 0.0
        return entry.prefill_owed * cost.prefill_token_s + entry.offloaded * cost.offload_block_s + back_s
