"""`vllm serve --scheduler-cls laps_sd_vllm.LapsSdScheduler`: the core orders inside vLLM's engine process, or watches.

Whatever goes wrong here ends in vLLM's own order, for good, and never in the end of the engine. Nothing here waits,
fits, reads or writes files in the engine's thread; at the start alone what was learned is read.
"""

import json
import time
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.request import Request, RequestStatus

from laps_sd_vllm import settings, status
from laps_sd_vllm.advice import Advice, Capacity
from laps_sd_vllm.asked import asked
from laps_sd_vllm.directed import Desired, Directed, Place, StepDone
from laps_sd_vllm.versions import Unsupported

GROUPS = 16  # kinds of KV blocks
LATE_PLANS = 3  # in a row, and it is stock order for good
STUCK_STEPS = 2  # in which somebody was to run, and nobody could
VARYING = ("transformers_version", "max_model_len")  # in a configuration, though the model is the same

logger = init_logger(f"vllm.{__name__}")  # vLLM's format and level


class LapsSd(Directed):
    """Settings: `laps_sd_vllm/settings.py`. Raises Unsupported, in one sentence, before anything is served."""

    most_groups = GROUPS

    def __init__(self, *args: Any, vllm_config: Any, **kwargs: Any) -> None:
        self.settings = settings.read(vllm_config.additional_config)
        self.obeys = self.settings.mode == "order"
        self.fallen = False
        super().__init__(*args, vllm_config=vllm_config, **kwargs)
        self.count_blocks = False
        self._late = self._stuck = 0
        self._groups = max(1, len(self.kv_cache_config.kv_cache_groups))  # encoders keep no KV
        if self.obeys:
            self.desired = Desired((), 0)  # nobody runs before the first plan: the core must have heard of all who run
        self._blocked: dict[str, tuple[Any, Any, bool]] = {}  # whose grammar is still compiled: to be submitted
        capacity = self._capacity()
        rank = vllm_config.parallel_config.data_parallel_index
        folder = Path(envs.VLLM_CACHE_ROOT) / "laps-sd"
        self.advice = Advice(
            self.settings,
            capacity,
            learned=self._learned(folder, rank),
            served=self._served(),
            status_file=status.written(status.folder(Path(envs.VLLM_CACHE_ROOT)), rank),
            blocks_of=self.held_blocks,
            say=logger.info,
        )
        self.on_step = self._step_done
        logger.info("LAPS-SD: mode %s, policy %s", self.settings.mode, self.advice.status.policy)

    def _capacity(self) -> Capacity:
        """The capacity to be shared. With several kinds of KV blocks a block counts as one of each. Of a sliding window
        vLLM keeps only some blocks, so that longer requests have room than the free blocks say: whatever vLLM takes in
        must be able to run."""
        rows = self._limits[0]
        asked_for = self.settings.slots
        if asked_for is not None and asked_for > rows:
            raise Unsupported(f"{settings.KEY}.slots is {asked_for}, and --max-num-seqs {rows}")
        drafter = self.vllm_config.speculative_config
        unverified = drafter is not None and (
            drafter.enable_adaptive_verification or (drafter.use_ngram_gpu() and not self.use_v2_model_runner)
        )
        if unverified and self.settings.draft_len == "auto":
            told = "vLLM does not tell how many drafts of this drafter it verified"
            raise Unsupported(f"{settings.KEY}.draft_len must not be auto: {told}")
        # The V2 runner keeps a row for each paused request.
        slots = asked_for or (max(1, rows * 3 // 4) if self.use_v2_model_runner and self.obeys else rows)
        return Capacity(
            slots=slots,
            blocks=max(self.blocks // self._groups, -(-self.max_model_len // self.block_size)),
            block_tokens=self.block_size,
            drafts=self.num_spec_tokens,
            step_tokens=self.max_num_scheduled_tokens,
            steps_ahead=int(isinstance(self, AsyncScheduler)),
        )

    def _learned(self, folder: Path, rank: int) -> Path | None:
        """One file for each rank: they would overwrite each other's."""
        asked_for = self.settings.learned
        if asked_for is False:
            return None
        if asked_for is not None:
            return asked_for.with_name(f"{asked_for.name}-{rank}") if rank else asked_for
        name = "".join(c if c.isalnum() or c in "._-" else "-" for c in str(self.vllm_config.model_config.model))
        return folder / f"{name[-80:]}-{rank}.learned"

    def _served(self) -> str:
        """As in Learning; the same after a restart."""
        model, drafter = self.vllm_config.model_config, self.vllm_config.speculative_config
        try:
            known = model.hf_config.to_dict() | dict.fromkeys(VARYING)
            told = json.dumps(known, sort_keys=True, default=lambda value: type(value).__name__)
        except Exception:  # of a model with code of its own: then its name must do
            told = ""
        told += f" {model.model} {model.revision}"
        drafts = f"{drafter.method} {drafter.model} {drafter.num_speculative_tokens}" if drafter is not None else "none"
        return f"{sha256(told.encode()).hexdigest()[:32]}/{drafts}"

    # ---- errors of ours ----

    def _safely(self, ours: Callable[..., Any], *args: Any) -> Any:
        if self.fallen:
            return None
        try:
            return ours(*args)
        except Exception as error:  # whatever it is: the engine goes on without us
            self._fall_back(f"{type(error).__name__}: {error}")
            return None

    def _fall_back(self, why: str) -> None:
        """Stock order for good. vLLM's state is put right before it schedules next."""
        self.fallen = True
        self.desired = None
        try:
            logger.error("LAPS-SD %s no more, vLLM's own order goes on: %s", f"{self.settings.mode}s", why)
            self.advice.fell_back(why)
        except Exception as error:  # then nobody hears of it, and the engine goes on all the same
            logger.error("LAPS-SD: that could not be counted: %s", error)

    # ---- what happens ----

    def add_request(self, request: Request) -> None:
        new = request.request_id not in self.requests
        super().add_request(request)
        self._safely(self._added, request, new)

    def _added(self, request: Request, new: bool) -> None:
        if request.resumable:
            if self.obeys:
                raise RuntimeError("requests with streamed input cannot be ordered")
            return
        if new:
            submitted = asked(request, self.max_model_len)
            if self.obeys and self._is_blocked_waiting_status(request.status):
                self._blocked[request.request_id] = submitted
            else:
                self.advice.submitted(*submitted, time.time())

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        ended = super().finish_requests(request_ids, finished_status)
        self._safely(self._gone, ended, request_ids is not None and finished_status is RequestStatus.FINISHED_ABORTED)
        return ended

    def _gone(self, ended: Iterable[Request], aborted: bool) -> None:
        """vLLM's front end looks for stop strings, and aborts what has come to one as if its client had left.
        `aborted`: these requests were, rather than all that there are, as where the server ends."""
        now = time.time()
        for request in ended:
            self._blocked.pop(request.request_id, None)
            params = request.sampling_params
            self.advice.cancelled(request.request_id, now, stopped=aborted and bool(params and params.stop))

    def _step_done(self, done: StepDone) -> None:
        done.free_blocks //= self._groups
        self.advice.step(done, time.time())
        self._stuck = 0 if done.rows or not done.skipped else self._stuck + 1

    def shutdown(self) -> None:
        try:
            self.advice.close()  # after a fall, too
        except Exception as error:
            logger.error("LAPS-SD: it did not end as it should: %s", error)
        super().shutdown()

    # ---- what is decided ----

    def _prepare(self) -> tuple[Any, Any] | None:
        if self.draining:
            return self._drain()
        for id in list(self._blocked):
            if self._handle_blocked_waiting_request(self.requests[id]):
                self.advice.submitted(*self._blocked.pop(id), time.time())
        began = time.thread_time()  # not the clock: on a busy machine everything is late
        made = self.advice.plan()
        if made is not None:
            give_back, self.desired = made
            for id in give_back:
                self.drop(id)
            self._in_time(time.thread_time() - began)
        if self._stuck >= STUCK_STEPS:
            self._make_room()
        return super()._prepare() if not self.fallen else None

    def _drain(self) -> tuple[Any, Any] | None:
        """All that have begun run to their end."""
        if self.advice.ordering is None:
            return None
        self.advice.ordering.again()
        self.desired = Desired([Place(each.request_id) for each in self.running], self._limits[0])
        return super()._prepare()

    def _in_time(self, seconds: float) -> None:
        limit_s = self.settings.plan_limit_ms / 1e3
        self.advice.planned(seconds, late=seconds > limit_s)
        self._late = self._late + 1 if seconds > limit_s else 0
        if self._late >= LATE_PLANS:
            self._fall_back(f"{LATE_PLANS} plans in a row took over {self.settings.plan_limit_ms:g} ms")

    def _make_room(self) -> None:
        """vLLM found memory for none of those that were to run: the worst paused one gives its own back."""
        self._stuck = 0
        if self.running and self.running[-1].request_id in self._paused:
            self.drop(self.running[-1].request_id, wished=False)


class SyncLapsSd(LapsSd):
    pass


class AsyncLapsSd(LapsSd, AsyncScheduler):  # type: ignore[misc]
    pass


class LapsSdScheduler:
    """For `--scheduler-cls`: the kind that goes with the configuration, as vLLM chooses its own."""

    def __new__(cls, *, vllm_config: Any, **kwargs: Any) -> Any:
        kind = AsyncLapsSd if vllm_config.scheduler_config.async_scheduling else SyncLapsSd
        return kind(vllm_config=vllm_config, **kwargs)
