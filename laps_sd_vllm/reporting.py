"""A vLLM scheduler that says what each of its steps did for each request. It changes nothing of what vLLM decides.

What vLLM does not promise to keep, and this relies on, is listed and checked in `relied_on.py`.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from laps_sd_vllm.steps import StepDone, StepRow


class Scheduled(NamedTuple):
    """One schedule() whose output is still to come. `plan`: vLLM's SchedulerOutput. `rows`: request, and tokens of its
    text computed."""

    plan: Any
    at: float
    rows: list[tuple[Request, int]]
    fresh: set[str]  # admitted in it: what is scheduled as their drafts is padding
    skipped: list[str]


class Reporting(Scheduler):  # type: ignore[misc]
    """`on_step` is told of each step in order. `stops` is asked for each new token of a request, in order and once;
    True: this token ends it. `count_blocks`: whether rows say how many blocks of KV each request has to itself, which
    takes a walk over them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.on_step: Callable[[StepDone], None] = lambda done: None
        self.stops: Callable[[Request, int], bool] | None = None
        self.count_blocks = True
        self._steps: deque[Scheduled] = deque()
        self._verified: dict[str, tuple[int, int]] = {}
        self._evicted: list[str] = []

    def _safely(self, ours: Callable[..., Any], *args: Any) -> Any:
        """Everything of ours is called by this, so that a plug-in can keep its errors from vLLM."""
        return ours(*args)

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
        return max(0, lacking(self.requests[id]))

    def in_flight(self, id: str | None = None) -> bool:
        """Whether a step was scheduled with it (None: with anybody) whose output is still to come."""
        ids = (request.request_id for step in self._steps for request, _ in step.rows)
        return any(id in (None, each) for each in ids)

    def _note(self, output: Any, chosen: Iterable[str]) -> Scheduled:
        """A schedule() is over, in which the requests `chosen` were to run."""
        rows = []
        for id, tokens in output.num_scheduled_tokens.items():
            request = self.requests[id]
            rows.append((request, min(max(lacking(request) + tokens, 0), tokens)))
        fresh = {new.req_id for new in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
        skipped = [id for id in chosen if id not in output.num_scheduled_tokens]
        step = Scheduled(output, time.perf_counter(), rows, fresh, skipped)
        self._steps.append(step)
        return step

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
        kept = len(new_token_ids)
        new_token_ids, stopped = super()._update_request_with_output(request, new_token_ids, *args, **kwargs)
        # The last token allowed may complete a stop string. Had an earlier one ended it, fewer would be left.
        full = request.status is RequestStatus.FINISHED_LENGTH_CAPPED and len(new_token_ids) == kept
        if ends and (full or not stopped):
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
        before = self._safely(self._before_output, scheduler_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if before is not None:
            self._safely(self._report, *before, outputs)
        return outputs

    def _before_output(self, plan: Any) -> tuple[Scheduled, list[tuple[Request, int, int]]] | None:
        """The step that this is the output of, and of each of its requests that is still there: tokens computed of its
        text, and output tokens before. None: of no step. Steps before it have none any more: vLLM survived a fault."""
        if all(step.plan is not plan for step in self._steps):
            return None
        while (step := self._steps.popleft()).plan is not plan:
            pass
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
                row.prefill_owed = max(0, lacking(request))
                if self.count_blocks:
                    row.blocks = self.private_blocks(id)
            row.logprobs = logprobs.get(id)
            rows.append(row)
        ran = {row.request_id for row in rows}
        for id in self._evicted:
            evicted = self.requests.get(id)
            if evicted is not None and id not in ran:
                rows.append(StepRow(id, evicted.num_output_tokens, prefill_owed=lacking(evicted), evicted=True))
        self._evicted.clear()
        self.on_step(StepDone(rows, self.free_blocks, step.at, time.perf_counter(), step.skipped))


def lacking(request: Request) -> int:
    """Tokens of its text still to be computed; the last token of an output is not, since it is the next step's input.
    Negative where later ones were computed already."""
    return int(request.num_tokens - (request.num_output_tokens > 0) - request.num_computed_tokens)
