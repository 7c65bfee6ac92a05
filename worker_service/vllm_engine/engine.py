"""The port filled by vLLM: its EngineCore in this process, stepped by the worker's model thread. Its executor (one
process, several, or Ray) holds the devices. Who runs is decided by commands; `laps_sd_vllm` makes vLLM obey."""

from collections.abc import Sequence, Set
from itertools import count, islice
from time import perf_counter
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMError
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.request import RequestStatus

from laps_sd_vllm.directed import Desired, Place, StepDone, StepRow
from laps_sd_vllm.relied_on import check_engine
from laps_sd_vllm.versions import Unsupported
from worker_service.engine.pass_costs import PassCosts
from worker_service.engine.stop import StopStrings
from worker_service.engine.types import Admission, Finish, Held, Limits, Row, Run, Sampling, Skip, StepResult
from worker_service.model_files import ModelError
from worker_service.vllm_engine.request import EngineRequest, ask, logprobs, problem

_FINISH = {RequestStatus.FINISHED_STOPPED: Finish.STOP, RequestStatus.FINISHED_LENGTH_CAPPED: Finish.LENGTH}
_MOST_TURNS = 64  # of vLLM's loop in one step: asynchronous batches and pipelines take a few until there is a result


class NotNowError(OSError):
    """The model cannot be loaded now."""


class VllmEngine:
    """Construct it anywhere; `bind_thread` loads the model. Then it is used from that thread alone."""

    host_blocks = 0

    def __init__(
        self, config: VllmConfig, tokenizer: Any, *, eos_ids: frozenset[int], max_draft: int, refused: dict[str, str]
    ) -> None:
        """`tokenizer`: of the tokenizers library. `max_draft`: tokens that vLLM drafts for a request in a step.
        `refused`: as in promises.py."""
        self._config, self._tokenizer = config, tokenizer
        self._eos_ids, self._max_draft, self._refused = eos_ids, max_draft, refused
        self._requests: dict[str, EngineRequest] = {}  # by id
        self._internal: dict[str, EngineRequest] = {}  # by vLLM's id; of those that vLLM has
        self._numbers = count()
        self._done: list[StepDone] = []  # steps that vLLM has told of and no result has yet
        self._core: EngineCore | None = None
        self._ended_at = 0.0
        self._block_size = config.cache_config.block_size  # with which --kv-tokens was reckoned
        self._chunk = (
            config.scheduler_config.long_prefill_token_threshold or config.scheduler_config.max_num_batched_tokens
        )

    # ---- sizes ----

    @property
    def blocks(self) -> int:
        return int(self._scheduler.blocks)

    @property
    def block_tokens(self) -> int:
        return int(self._scheduler.block_size)

    @property
    def free_blocks(self) -> int:
        return int(self._scheduler.free_blocks)

    @property
    def vocab_size(self) -> int:
        return int(self._config.model_config.get_vocab_size())

    @property
    def context_tokens(self) -> int:
        """The context of the model, or as much as KV memory holds if that is less."""
        return min(int(self._config.model_config.max_model_len), self.blocks * self.block_tokens)

    # ---- life ----

    def bind_thread(self, threads: int) -> None:
        """Load the model here: CUDA's device and OpenMP's binding belong to the thread that computes."""
        try:
            self._core = EngineCore(self._config, Executor.get_class(self._config), log_stats=False)
            check_engine(self._core)
        except Unsupported as error:
            raise ModelError(f"vLLM cannot be a worker's engine with these settings: {error}") from error
        except ValueError as error:  # memory that others hold now may be free another time
            raise NotNowError(f"vLLM could not start: {error}") from error
        cache = self._config.cache_config
        if cache.kv_cache_memory_bytes and cache.num_gpu_blocks_override and cache.block_size != self._block_size:
            told = f"vLLM has blocks of {cache.block_size} tokens for this model"
            raise ModelError(f'kv_tokens: {told}; add "block_size": {cache.block_size} to --vllm-args')
        self._scheduler: Any = self._core.scheduler
        self._scheduler.desired = Desired((), 0)
        self._scheduler.on_step = self._done.append
        self._scheduler.stops = self._stops
        self._rehearse()

    def _rehearse(self) -> None:
        """One request that draws, with log-probabilities and penalties: vLLM compiles what they need at their first
        use, which may take longer than a step may."""
        name, prompt = "rehearsal", [token % self.vocab_size for token in (1, 2, 3, 4)] * 8
        sampling = Sampling(1.0, top_p=0.9, top_k=5, seed=1, presence_penalty=0.1, logprobs=1)
        self.admit(Admission(name, 0, prompt, len(prompt), sampling, Limits(8, ignore_eos=True), salt=name))
        while self.runnable(run := Run(name, self._max_draft, len(prompt))):
            self.step([run], 1)
        self.forget(name)

    def close(self) -> None:
        """End vLLM's own processes. The thread must have ended."""
        if self._core is not None:
            self._core.shutdown()

    # ---- requests ----

    def admit(self, admission: Admission) -> None:
        """See EnginePort. vLLM cannot cut KV: a request that comes with other tokens than it has begins anew, and finds
        whole blocks of its beginning in the prefix cache."""
        name = admission.request_id
        known = self._requests.get(name)
        if known is not None and known.agrees(admission):
            known.admission = admission
            return
        self.forget(name)
        output = admission.tokens[admission.prompt_len :]
        allowed = min(admission.limits.max_tokens, self.context_tokens - admission.prompt_len)
        request = self._requests[name] = EngineRequest(
            admission,
            f"{name}#{next(self._numbers)}",
            list(admission.tokens),
            before=len(output),
            remaining=allowed - len(output),
            stops=StopStrings(self._tokenizer, admission.limits.stop, output),
            error=problem(admission, self.vocab_size, self.context_tokens, self._refused),
        )
        if not request.error and request.remaining > 0:
            self._ask(request)

    def _ask(self, request: EngineRequest) -> None:
        assert self._core is not None
        try:
            self._core.add_request(*self._core.preprocess_add_request(ask(request, self._eos_ids)))
        except (ValueError, VLLMError) as error:
            request.error = str(error)
            return
        request.asked = True
        self._internal[request.internal] = request

    def forget(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None and self._internal.pop(request.internal, None) is not None:
            assert self._core is not None
            self._core.abort_requests([request.internal])

    def drop(self, request_id: str) -> None:
        if (request := self._requests.get(request_id)) is not None and request.asked:
            self._scheduler.drop(request.internal)

    def offload(self, request_id: str) -> None:
        """There is no room in the host's memory that we know of."""
        self.drop(request_id)

    def held(self) -> list[Held]:
        return [request.held(*self._kv(request)) for request in self._requests.values()]

    def _kv(self, request: EngineRequest) -> tuple[int, int]:
        """Blocks that only it holds, and tokens to be computed before it can draft."""
        if not request.asked or request.finish is not None:
            return 0, 0
        return self._scheduler.private_blocks(request.internal), self._scheduler.prefill_owed(request.internal)

    def runnable(self, run: Run) -> bool:
        request = self._requests.get(run.request_id)
        if request is None or request.finish is not None:
            return False
        if not request.asked or self._scheduler.in_flight(request.internal):  # a step brings what is in flight
            return True
        return bool(self._scheduler.runnable(request.internal, run.prefill_tokens))

    def _stops(self, asked: Any, token: int) -> bool:
        """Whether a token that vLLM is about to add ends its request, by a stop string."""
        request = self._internal.get(asked.request_id)
        return request is not None and request.stopped_by(token)

    def weigh_drafts(self, costs: PassCosts | None) -> None:
        """How long drafts are is for vLLM to choose."""

    def rehearse_drafts(self, batch: int, draft_len: int) -> None:
        """vLLM drafts within its step, and does not tell how long it takes: that counts as verifying."""

    def rehearse_offload(self, blocks: int) -> None:
        """Nothing is offloaded."""

    # ---- steps ----

    def step(self, schedule: Sequence[Run], slots: int) -> StepResult:
        """See EnginePort. A result may be that of an earlier schedule, where vLLM works on several batches at once."""
        begun = perf_counter()
        ended, places = self._plan(schedule)
        self._scheduler.desired = Desired(places, slots)
        if places:
            self._bound_prefill(places, slots)
            self._turn()
        done, self._done[:] = list(self._done), []
        verify_s = 0.0
        told: dict[str, Row] = {}  # by vLLM's id; the last row of each, where it was evicted before
        passed_over: dict[str, EngineRequest] = {}
        for each in done:
            verify_s += each.done_at - max(each.scheduled_at, self._ended_at, begun)
            self._ended_at = each.done_at
            passed_over |= {name: self._internal[name] for name in each.skipped if name in self._internal}
            told |= {row.request_id: self._row(row) for row in each.rows if row.request_id in self._internal}
        # If nobody ran, something must be said, or nobody would ever do something about it.
        alone = all(row.skipped is not None for row in told.values())
        others = [request for name, request in passed_over.items() if name not in told]
        lacking = [request for request in others if alone or self._lacks_blocks(request)]
        rows = [*ended, *told.values(), *(request.skipped(*self._kv(request)) for request in lacking)]
        if not alone:
            rows += self._under_way(schedule, {row.request_id for row in rows})
        return StepResult(tuple(rows), self.free_blocks, 0.0, verify_s, perf_counter() - begun - verify_s)

    def _under_way(self, schedule: Sequence[Run], told: Set[str]) -> list[Row]:
        """In a pipeline a result is that of one batch of several: rows of requests in the others, which have not been
        preempted."""
        others = [self._requests.get(run.request_id) for run in schedule if run.request_id not in told]
        live = [each for each in others if each is not None and each.asked and each.finish is None]
        return [
            each.skipped(*self._kv(each), Skip.DEFERRED) for each in live if self._scheduler.in_flight(each.internal)
        ]

    def _lacks_blocks(self, request: EngineRequest) -> bool:
        """Why vLLM passed it over: there are too few free blocks, and not too many tokens in the batch already."""
        tokens = min(self._scheduler.prefill_owed(request.internal) or 1 + self._max_draft, self._chunk)
        return bool(self.free_blocks < -(-tokens // self.block_tokens))

    def _plan(self, schedule: Sequence[Run]) -> tuple[list[Row], list[Place]]:
        """Rows of requests that end without computing anything, and what vLLM is to run."""
        rows, places = [], []
        for run in {run.request_id: run for run in schedule}.values():
            request = self._requests.get(run.request_id)
            if request is None or request.finish is not None:
                continue
            if request.asked:
                places.append(Place(request.internal, min(run.draft_len, self._max_draft), run.prefill_tokens))
            else:
                request.finish = Finish.ERROR if request.error else Finish.LENGTH
                rows.append(request.row(request.output_tokens))
        return rows, places

    def _bound_prefill(self, places: Sequence[Place], slots: int) -> None:
        """No request prefills more than its schedule says. vLLM knows one bound for all, so the least one counts, none
        for a request that is the only one it has, and none below the places of one request's drafts."""
        running = islice(
            (each for each in places if self._scheduler.runnable(each.request_id, each.prefill_tokens)), slots
        )
        bounds = [each.prefill_tokens for each in running if self._scheduler.prefill_owed(each.request_id)]
        self._config.scheduler_config.long_prefill_token_threshold = max(
            min([*bounds, self._chunk]), 1 + self._max_draft
        )

    def _turn(self) -> None:
        """Let vLLM go round until it tells of a step that did something, or has nothing under way. One that only passed
        over requests tells nothing as long as others are to come, or where all of these have ended."""
        assert self._core is not None
        for _ in range(_MOST_TURNS):
            if not self._scheduler.has_requests():
                return
            outputs, executed = self._core.step_fn()
            self._core.post_step(executed)
            rows = [row for done in self._done for row in done.rows]
            passed_over = any(name in self._internal for done in self._done for name in done.skipped)
            told = any(not row.evicted for row in rows) or ((rows or passed_over) and not self._scheduler.in_flight())
            if told or not (outputs or executed or self._core.batch_queue):
                return

    def _row(self, row: StepRow) -> Row:
        request = self._internal[row.request_id]
        start = request.before + row.start
        if row.evicted:
            return request.skipped(0, row.prefill_owed)
        request.tokens += row.tokens
        if row.status is not None:
            del self._internal[row.request_id]  # vLLM has forgotten it, too
            request.finish = _FINISH.get(row.status, Finish.ERROR)
            request.error = f"vLLM ended it: {row.status.name}" if request.finish is Finish.ERROR else ""
        top = request.admission.sampling.logprobs
        return request.row(
            start,
            tokens=tuple(row.tokens),
            drafted=row.drafted,
            accepted=row.accepted,
            prefilled=row.prefilled,
            blocks=row.blocks,
            num_uncomputed=row.prefill_owed,
            logprobs=() if top is None or row.logprobs is None else logprobs(row.logprobs, len(row.tokens), top),
        )
