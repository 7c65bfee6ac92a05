"""A vLLM scheduler that runs who it is told to run: the first `slots` runnable requests of a ranking, best first.

Whoever runs and is not among them is paused: it is not scheduled, and keeps its KV. Which order is right is decided
elsewhere. This is the only file that touches what vLLM does not promise to keep; `relied_on.py` lists and checks it.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from laps_sd_vllm.relied_on import check
from laps_sd_vllm.steps import Desired, Place, StepDone, StepRow

__all__ = ["AsyncDirected", "Desired", "Directed", "DirectedScheduler", "Place", "StepDone", "StepRow", "SyncDirected"]

PAUSED = 1 << 62  # a step that never comes
NO_LIMIT = 1 << 30


class Scheduled(NamedTuple):
    """One schedule() whose output is still to come. `rows`: request, and tokens of its text computed."""

    at: float
    rows: list[tuple[Request, int]]
    fresh: set[str]  # admitted in it: what is scheduled as their drafts is padding
    skipped: list[str]


class Directed(Scheduler):  # type: ignore[misc]
    """`desired`: None for vLLM's own order. `on_step` is told of each step in order. `stops` is asked for each new token
    of a request, in order and once; True: this token ends it. `count_blocks`: whether rows say how many blocks of KV
    each request has to itself, which takes a walk over them.

    Raises Unsupported, in one sentence, where it cannot keep its promises.
    """

    most_groups = 1  # of KV blocks

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check(self, self.most_groups)
        self.desired: Desired | None = None
        self.on_step: Callable[[StepDone], None] = lambda done: None
        self.stops: Callable[[Request, int], bool] | None = None
        self.count_blocks = True
        self._directing = False
        self._limits = self.max_num_running_reqs, self.max_num_active_reqs
        self._paused: dict[str, int] = {}  # each with the step from which vLLM would have scheduled it
        self._settled: Desired | None = None  # obeyed, and as long as nothing else changes there is nothing to do
        self._chosen: dict[str, Place] = {}
        self._trims: list[tuple[Request, int]] = []  # chosen requests that verify fewer drafts than there are
        self._steps: deque[Scheduled] = deque()
        self._verified: dict[str, tuple[int, int]] = {}
        self._evicted: list[str] = []
        self._dropping = self._scheduling = False

    # ---- what may be asked ----

    @property
    def blocks(self) -> int:
        """Of KV in all; one of vLLM's is never used."""
        return int(self.kv_cache_manager.block_pool.num_gpu_blocks) - 1

    @property
    def free_blocks(self) -> int:
        return int(self.kv_cache_manager.block_pool.get_num_free_blocks())

    def private_blocks(self, id: str) -> int:
        """Of KV that no other request shares."""
        return sum([each.ref_cnt == 1 for group in self.kv_cache_manager.get_blocks(id).blocks for each in group])

    def held_blocks(self, id: str) -> int:
        """Of KV, shared ones included, in the largest of its groups."""
        return max(map(len, self.kv_cache_manager.get_blocks(id).blocks), default=0)

    def prefill_owed(self, id: str) -> int:
        """Tokens of its text that must be computed before it can draft."""
        return max(0, _lacking(self.requests[id]))

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
        elif self.use_pp and request.num_tokens_with_spec + request.num_output_placeholders <= request.num_computed_tokens:
            return False  # it is in flight
        return prefill_tokens > 0 or _lacking(request) <= 0

    # ---- before a step ----

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._safely(self._obey)
        hidden = self._safely(self._hide)
        self._scheduling = True
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self._scheduling = False
            if hidden is not None:  # written out: whatever happens, no request may be lost here
                for queue, shown in zip(hidden, (self.waiting, self.kv_holding_waiting), strict=True):
                    queue.extendleft(reversed(shown))
                self.waiting, self.kv_holding_waiting = hidden
        self._safely(self._note, output)
        return output

    def _safely(self, ours: Callable[..., Any], *args: Any) -> Any:
        """Everything of ours is called by this, so that a plug-in can keep its errors from vLLM."""
        return ours(*args)

    def _obey(self) -> None:
        if self.desired is None:
            if self._directing:
                self.release()
            return
        if not self._directing:
            self._directing = True
            if not self.use_v2_model_runner:  # this runner keeps no row for a request that it does not run
                self.max_num_running_reqs = self.max_num_active_reqs = NO_LIMIT
        if self.desired is not self._settled:
            self._choose(self.desired)
        for request, most in self._trims:
            if len(request.spec_token_ids) > most:
                request.spec_token_ids = request.spec_token_ids[:most]

    def _choose(self, desired: Desired) -> None:
        """Who runs in this step: pause the others, and put the victims of short memory last."""
        chosen: dict[str, Place] = {}
        passed_over = False
        for place in desired.rank:
            if len(chosen) == desired.slots:
                break
            request = self.requests.get(place.request_id)
            if request is not None:
                if self._can_run(request, place.prefill_tokens):
                    chosen[place.request_id] = place
                else:
                    passed_over = True
        order = {id: number for number, id in enumerate(chosen)}
        for number, place in enumerate(desired.rank, len(order)):
            order.setdefault(place.request_id, number)
        last = len(order) + len(chosen)
        self.running.sort(key=lambda request: order.get(request.request_id, last))
        self._chosen, self._trims = chosen, []
        running = 0
        for request in self.running:
            id = request.request_id
            if id not in chosen:
                if id not in self._paused:
                    self._paused[id] = request.next_decode_eligible_step
                    request.next_decode_eligible_step = PAUSED
                continue
            running += 1
            if id in self._paused:
                self._resume(request)
            if chosen[id].draft_len < self.num_spec_tokens:
                self._trims.append((request, chosen[id].draft_len))
        entrants = len(chosen) - running
        while len(self.running) + entrants > self.max_num_running_reqs and self.running[-1].request_id not in chosen:
            self.drop(self.running[-1].request_id)  # the model runner has no row left
        changes = entrants or passed_over or self.use_pp or any([not place.prefill_tokens for place in desired.rank])
        self._settled = None if changes else desired

    def _resume(self, request: Request) -> None:
        request.next_decode_eligible_step = self._paused.pop(request.request_id)
        if isinstance(self, AsyncScheduler) and not self.use_v2_model_runner:
            # This runner kept the drafts in the batch that the request has left: what is listed here is padding.
            request.spec_token_ids = []

    def _hide(self) -> tuple[Any, Any] | None:
        """Show vLLM only the waiting requests that are chosen. Returns its queues, as they are to be afterwards."""
        if not self._directing:
            return None
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

    def _note(self, output: Any) -> None:
        rows = []
        for id, tokens in output.num_scheduled_tokens.items():
            request = self.requests[id]
            rows.append((request, min(max(_lacking(request) + tokens, 0), tokens)))
        fresh = {new.req_id for new in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
        skipped = [id for id in self._chosen if id not in output.num_scheduled_tokens] if self._directing else []
        if skipped or fresh:
            self._settled = None
        self._steps.append(Scheduled(time.perf_counter(), rows, fresh, skipped))

    def drop(self, id: str) -> None:
        """Give back its KV; it is computed again when it runs."""
        request = self.requests.get(id)
        if request is not None and request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._dropping = True
            try:
                self._preempt_request(request, time.monotonic())
            finally:
                self._dropping = False

    def release(self) -> None:
        """vLLM's own order from now on, and for all that it has now."""
        self.desired = self._settled = None
        self._directing = False
        self._chosen, self._trims = {}, []
        for request in self.running:
            if request.request_id in self._paused:
                self._resume(request)
        self._paused.clear()
        while len(self.running) > self._limits[0]:
            self.drop(self.running[-1].request_id)
        self.max_num_running_reqs, self.max_num_active_reqs = self._limits
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

    # ---- after a step ----

    def make_spec_decoding_stats(self, *args: Any, **told: Any) -> Any:
        self._safely(self._verify, told)
        return super().make_spec_decoding_stats(*args, **told)

    def _verify(self, told: dict[str, Any]) -> None:
        """vLLM counts drafts that a grammar has ruled out as rejected ones; here they count as not drafted."""
        id = told["request_id"]
        invalid = (told["num_invalid_spec_tokens"] or {}).get(id, 0)
        self._verified[id] = told["num_draft_tokens"] - invalid, told["num_accepted_tokens"]

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        stale = kwargs.get("is_stale", args[0] if args else False)
        ends = self.stops is not None and self._cut(request, new_token_ids, stale)
        new_token_ids, stopped = super()._update_request_with_output(request, new_token_ids, *args, **kwargs)
        if ends and not stopped:
            request.status, request.stop_reason, stopped = RequestStatus.FINISHED_STOPPED, "stop string", True
        return new_token_ids, stopped

    def _cut(self, request: Request, tokens: list[int], stale: bool) -> bool:
        """Whether one of them ends the request; those after it are taken away."""
        assert self.stops is not None
        for number, token in enumerate(tokens, 1):
            if self.stops(request, token):
                if not stale:  # as where vLLM trims: they are no part of the text
                    request.num_computed_tokens -= len(tokens) - number
                del tokens[number:]
                return True
        return False

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        before = self._safely(self._before_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if before is not None:
            self._safely(self._report, *before, outputs)
        return outputs

    def _before_output(self) -> tuple[Scheduled, list[tuple[Request, int, int]]]:
        """The step that this is the output of, and of each of its requests that is still there: tokens computed of its
        text, and output tokens before."""
        step = self._steps.popleft()
        self._verified.clear()
        live = self.requests
        return step, [
            (request, prefilled, request.num_output_tokens)
            for request, prefilled in step.rows
            if live.get(request.request_id) is request
        ]

    def _report(self, step: Scheduled, before: list[tuple[Request, int, int]], outputs: Any) -> None:
        logprobs = {each.request_id: each.new_logprobs for one in outputs.values() for each in one.outputs}
        rows = []
        for request, prefilled, start in before:
            id = request.request_id
            drafted, accepted = (0, 0) if id in step.fresh else self._verified.get(id, (0, 0))
            row = StepRow(id, start, list(request.output_token_ids[start:]), drafted, accepted, prefilled)
            if accepted > len(row.tokens):
                row.accepted = len(row.tokens)
            if request.is_finished():
                row.status, row.stop_reason = request.status, request.stop_reason
            else:
                row.prefill_owed = max(0, _lacking(request))
                if self.count_blocks:
                    row.blocks = self.private_blocks(id)
            row.logprobs = logprobs.get(id)
            rows.append(row)
        ran = {row.request_id for row in rows}
        for id in self._evicted:
            evicted = self.requests.get(id)
            if evicted is not None and id not in ran:
                rows.append(StepRow(id, evicted.num_output_tokens, prefill_owed=_lacking(evicted), evicted=True))
        self._evicted.clear()
        self.on_step(StepDone(rows, self.free_blocks, step.at, time.perf_counter(), step.skipped))

    def get_request_counts(self) -> tuple[int, int]:
        """Running and waiting ones; paused ones wait. vLLM's gauges are made of this."""
        running, waiting = super().get_request_counts()
        paused = 0 if self._scheduling else len(self._paused)
        return running - paused, waiting + paused


def _lacking(request: Request) -> int:
    """Tokens of its text still to be computed; the last token of an output is not, since it is the next step's input.
    Negative where later ones were computed already."""
    return int(request.num_tokens - (request.num_output_tokens > 0) - request.num_computed_tokens)


class SyncDirected(Directed):
    pass


class AsyncDirected(Directed, AsyncScheduler):  # type: ignore[misc]
    pass


class DirectedScheduler:
    """For vLLM's `scheduler_cls`: the kind that goes with the configuration, as vLLM chooses its own."""

    def __new__(cls, *, vllm_config: Any, **kwargs: Any) -> Any:
        kind = AsyncDirected if vllm_config.scheduler_config.async_scheduling else SyncDirected
        return kind(vllm_config=vllm_config, **kwargs)
