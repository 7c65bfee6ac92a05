"""A vLLM scheduler that runs who it is told to run: the first `slots` runnable requests of a ranking, best first.

One that runs unnamed is paused: it is not scheduled, and keeps its KV. Which order is right is decided
elsewhere. What vLLM does not promise to keep, and this relies on, is listed and checked in `relied_on.py`.
"""

import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.request import Request, RequestStatus

from laps_sd_vllm.relied_on import check
from laps_sd_vllm.reporting import Reporting, lacking
from laps_sd_vllm.steps import Desired, Place, StepDone, StepRow

__all__ = ["AsyncDirected", "Desired", "Directed", "DirectedScheduler", "Place", "StepDone", "StepRow", "SyncDirected"]

PAUSED = 1 << 62  # a step that never comes
NO_LIMIT = 1 << 30


class Directed(Reporting):
    """`desired`: None for vLLM's own order. Raises Unsupported, in one sentence, where it cannot keep its promises."""

    most_groups = 1  # of KV blocks
    obeys = True  # else it only reports

    waiting: Any  # vLLM's queues
    kv_holding_waiting: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check(self, self.most_groups if self.obeys else None)
        self.desired: Desired | None = None
        self._directing = False
        self._limits = self.max_num_running_reqs, self.max_num_active_reqs
        self._paused: dict[str, int] = {}  # each with the step from which vLLM would have scheduled it
        self._settled: Desired | None = None  # obeyed, and as long as nothing else changes there is nothing to do
        self._chosen: dict[str, Place] = {}
        self._trims: list[tuple[Request, int]] = []  # chosen requests that verify fewer drafts than there are
        self._dropping = self._scheduling = False

    # ---- what may be asked ----

    @property
    def draining(self) -> bool:
        """Whether vLLM was told to begin no request (its call /pause)."""
        return bool(self.pause_state != PauseState.UNPAUSED)

    def runnable(self, id: str, prefill_tokens: int = NO_LIMIT) -> bool:
        """Whether it would run if it were chosen, memory permitting."""
        request = self.requests.get(id)
        return request is not None and self._can_run(request, prefill_tokens)

    def _can_run(self, request: Request, prefill_tokens: int) -> bool:
        status = request.status
        if status is not RequestStatus.RUNNING:
            if request.is_finished() or request.num_stale_output_tokens:
                return False
            # Its grammar may be ready by now. vLLM looks only at the requests that it is shown.
            if self._is_blocked_waiting_status(status) and not self._handle_blocked_waiting_request(request):
                return False
        elif (
            self.use_pp
            and request.num_tokens_with_spec + request.num_output_placeholders <= request.num_computed_tokens
        ):
            return False  # it is in flight
        return prefill_tokens > 0 or lacking(request) <= 0

    def _must_wait(self, request: Request) -> bool:
        """In a pipeline of the V2 runner a request decodes in every so many steps only, and this is none of them."""
        eligible = self._paused.get(request.request_id, request.next_decode_eligible_step)
        return bool(self.current_step + 1 < eligible)

    # ---- before a step ----

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self._safely(self._prepare)
        if self.desired is None and self._directing:
            self.release()
        self._scheduling = True
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self._scheduling = False
            if hidden is not None:  # written out: whatever happens, no request may be lost here
                for queue, shown in zip(hidden, (self.waiting, self.kv_holding_waiting), strict=True):
                    queue.extendleft(reversed(shown))
                self.waiting, self.kv_holding_waiting = hidden
        self._safely(self._scheduled, output)
        return output

    def _prepare(self) -> tuple[Any, Any] | None:
        """Returns vLLM's queues as they are to be after its schedule(); None: as it leaves them."""
        if self.desired is None:
            return None
        self._obey(self.desired)
        return self._hide()

    def _obey(self, desired: Desired) -> None:
        if not self._directing:
            self._directing = True
            if not self.use_v2_model_runner:  # this runner keeps no row for a request that it does not run
                self.max_num_running_reqs = self.max_num_active_reqs = NO_LIMIT
        if desired is not self._settled:
            self._choose(desired)
        for request, most in self._trims:
            if len(request.spec_token_ids) > most:
                request.spec_token_ids = request.spec_token_ids[:most]

    def _choose(self, desired: Desired) -> None:
        """Who runs in this step: pause the others, and put the victims of short memory last."""
        chosen, first, passed_over = self._pick(desired)
        order = {id: number for number, id in enumerate(first)}
        for number, place in enumerate(desired.rank, len(order)):
            order.setdefault(place.request_id, number)
        last = len(order) + len(chosen)
        self.running.sort(key=lambda request: order.get(request.request_id, last))
        self._chosen, self._trims = chosen, []
        entrants = len(chosen)
        for request in self.running:
            own = chosen.get(request.request_id)
            if own is None:
                self._pause(request)
            else:
                self._go_on(request, own.draft_len)
                entrants -= 1
        while len(self.running) + entrants > self.max_num_running_reqs and self.running[-1].request_id not in first:
            self.drop(self.running[-1].request_id, wished=False)  # the model runner has no row left
        changes = entrants or passed_over or self.use_pp or any(not place.prefill_tokens for place in chosen.values())
        self._settled = None if changes else desired

    def _pick(self, desired: Desired) -> tuple[dict[str, Place], list[str], bool]:
        """Returns the chosen requests with their places; the ids of these and of those that only wait for their turn,
        whose KV is to be taken last; and whether any was passed over."""
        chosen: dict[str, Place] = {}
        first: list[str] = []
        passed_over = False
        for place in desired.rank:
            if len(chosen) == desired.slots:
                break
            request = self.requests.get(place.request_id)
            if request is None:
                continue
            if self._can_run(request, place.prefill_tokens):
                first.append(place.request_id)
                if not self._must_wait(request):
                    chosen[place.request_id] = place
                    continue
            passed_over = True
        return chosen, first, passed_over

    def _pause(self, request: Request) -> None:
        if request.request_id not in self._paused:
            self._paused[request.request_id] = request.next_decode_eligible_step
            request.next_decode_eligible_step = PAUSED

    def _go_on(self, request: Request, draft_len: int) -> None:
        """With at most so many drafts."""
        if request.request_id in self._paused:
            self._resume(request)
        if draft_len < self.num_spec_tokens:
            self._trims.append((request, draft_len))

    def _resume(self, request: Request) -> None:
        request.next_decode_eligible_step = self._paused.pop(request.request_id)
        if isinstance(self, AsyncScheduler) and not self.use_v2_model_runner:
            # This runner kept the drafts in the batch that the request has left: what is listed here is padding.
            request.spec_token_ids = []

    def _hide(self) -> tuple[Any, Any]:
        """Show vLLM only the waiting requests that are chosen."""
        chosen = map(self.requests.__getitem__, self._chosen)
        entrants = [request for request in chosen if request.status is not RequestStatus.RUNNING]
        hidden = self.waiting, self.kv_holding_waiting
        shown = create_request_queue(self.policy), create_request_queue(self.policy)
        for request in entrants:
            shown[0].add_request(request)
        if entrants:
            for queue in hidden:
                queue.remove_requests(entrants)
        self.waiting, self.kv_holding_waiting = shown
        return hidden

    def _scheduled(self, output: Any) -> None:
        step = self._note(output, self._chosen)
        if step.skipped or step.fresh:
            self._settled = None

    def drop(self, id: str, *, wished: bool = True) -> None:
        """Give back its KV; it is computed again when it runs. `wished`: by whoever decides the order, who then is
        not told."""
        request = self.requests.get(id)
        if request is not None and request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._dropping = wished
            try:
                self._preempt_request(request, time.monotonic())
            finally:
                self._dropping = False

    def release(self) -> None:
        """vLLM's own order from now on, and for all that it has now. Calls nothing else of ours: it is what an error of
        ours ends with."""
        self.desired = self._settled = None
        self._directing = False
        self._chosen, self._trims = {}, []
        drafts_lost = isinstance(self, AsyncScheduler) and not self.use_v2_model_runner
        for request in self.requests.values():
            if request.next_decode_eligible_step == PAUSED:
                request.next_decode_eligible_step = self._paused.get(request.request_id, 0)
                if drafts_lost:
                    request.spec_token_ids = []
        self._paused.clear()
        self.max_num_running_reqs, self.max_num_active_reqs = self._limits
        while len(self.running) > self.max_num_running_reqs:
            super()._preempt_request(self.running.pop(), time.monotonic())
        for queue in (self.waiting, self.kv_holding_waiting):
            by_arrival = sorted(queue, key=lambda request: request.arrival_time)
            queue.clear()
            queue.extend(by_arrival)

    # ---- what vLLM does with a request ----

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._safely(self._forget, request, not self._dropping)
        super()._preempt_request(request, *args, **kwargs)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._safely(self._forget, request, False)
        return super()._free_request(request, *args, **kwargs)

    def _forget(self, request: Request, evicted: bool) -> None:
        """It leaves the running ones."""
        id = request.request_id
        self._settled = None
        if id in self._paused:
            request.next_decode_eligible_step = self._paused.pop(id)
        if evicted:
            self._evicted.append(id)

    def get_request_counts(self) -> tuple[int, int]:
        """Running and waiting ones; paused ones wait. vLLM's gauges are made of this."""
        running, waiting = super().get_request_counts()
        paused = 0 if self._scheduling else self._safely(self._count_paused) or 0
        return running - paused, waiting + paused

    def _count_paused(self) -> int:
        """Those that are to count as waiting: none while vLLM begins no request, for then it tells from the running
        ones whether all have ended."""
        return 0 if self.draining else len(self._paused)


class SyncDirected(Directed):
    pass


class AsyncDirected(Directed, AsyncScheduler):  # type: ignore[misc]
    pass


class DirectedScheduler:
    """For vLLM's `scheduler_cls`: the kind that goes with the configuration, as vLLM chooses its own."""

    def __new__(cls, *, vllm_config: Any, **kwargs: Any) -> Any:
        kind = AsyncDirected if vllm_config.scheduler_config.async_scheduling else SyncDirected
        return kind(vllm_config=vllm_config, **kwargs)
