"""What a policy sees of a request, from all that the core knows of it. Decides nothing."""

from typing import TYPE_CHECKING

from scheduler_service.core.entry import Entry
from scheduler_service.core.lifecycle import State
from scheduler_service.core.types import View

if TYPE_CHECKING:
    from scheduler_service.core.core import Core


def view_of(core: "Core", entry: Entry) -> View:
    request, cost = entry.request, core.cost
    predicted = core.length.predict(request.predicted_tokens, request.max_tokens, request.expected)
    known, fleet = request.expected.acceptance if request.expected else None, core.acceptance
    prefill_s = cost.prefill_token_s
    return View(
        request=request,
        attained_s=entry.rounds * core.round_s + entry.prefilled * prefill_s,
        emitted=entry.emitted,
        acceptance=entry.acceptance,
        predicted_tokens=max(predicted, entry.emitted),
        prefill_s=request.prompt_tokens * prefill_s,
        perceptible=entry.perceptible,
        length=entry.length,
        prior_accepted=fleet.per_round if known is None else known * fleet.drafts_per_round,
        resume_s=entry.prefill_owed * prefill_s
        + entry.offloaded * cost.offload_block_s
        + (cost.resume_s if entry.state is State.PAUSED else 0.0),
    )
