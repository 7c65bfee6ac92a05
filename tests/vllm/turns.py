"""One vLLM engine on which schedulers take turns: the model is loaded once, and each run has a scheduler of its own,
with its own max_num_seqs and KV memory. No assertions of tests live here."""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tests.vllm.drive import add, make_core, run_all, step

BLOCK, CONTEXT, ROWS = 32, 1024, 64  # tokens of a block of KV; of a request; requests of a batch
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
ENDS = [2]  # <|im_end|>


@dataclass(frozen=True)
class Cell:
    """`seqs`: vLLM's --max-num-seqs. `blocks`: of KV."""

    name: str
    seqs: int
    blocks: int


@dataclass(frozen=True)
class Asked:
    """`most`: output tokens. `whole`: exactly so many, wherever the model would end."""

    prompt: list[int]
    most: int
    whole: bool = False


@dataclass
class Served:
    """What its client saw, in seconds since the run began."""

    arrival: float
    first: float = 0.0
    last: float = 0.0
    pause: float = 0.0  # the longest time between two deliveries
    text: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return len(self.text)

    def got(self, tokens: list[int], now: float) -> None:
        if not self.text:
            self.first = now
        else:
            self.pause = max(self.pause, now - self.last)
        self.last = now
        self.text += tokens


@dataclass(frozen=True)
class Run:
    """`waited`: the share of the time in which somebody waited: somebody who was there got no place in a step.
    `fell_back`: why LAPS-SD left the order to vLLM in the middle of it; empty where it did not."""

    served: list[Served]
    steps: list[tuple[int, float]]  # tokens that each computed, and its seconds
    waited: float
    fell_back: str


class Turns:
    """`blocks`: of KV, of the largest cell. The engine is made when it is first needed."""

    def __init__(self, blocks: int) -> None:
        self.blocks, self._runs = blocks, 0
        self._tokens = 0  # that the last step computed

    @cached_property
    def _core(self) -> Any:
        core = make_core(
            None, max_num_seqs=ROWS, max_model_len=CONTEXT, block_size=BLOCK, blocks=self.blocks,
            max_num_batched_tokens=2048, speculative_config=DRAFTS,
        )  # fmt: skip
        for number in range(ROWS // 4):  # what is slow the first time
            add(core, f"warm-up{number}", [100 + number] * 40, 8)
        run_all(core)
        execute = core.model_executor.execute_model

        def noted(scheduled: Any, **more: Any) -> Any:
            self._tokens = scheduled.total_num_scheduled_tokens
            return execute(scheduled, **more)

        core.model_executor.execute_model = noted
        return core

    def serve(self, cell: Cell, ours: dict[str, Any] | None, asked: Sequence[Asked], at: Sequence[float]) -> Run:
        """Each request comes so many seconds after the beginning. `ours`: settings of LAPS-SD; None: vLLM's own
        scheduler."""
        core = self._core
        core.scheduler = scheduler = self._scheduler(cell, ours)
        self._runs += 1
        served = [Served(when) for when in at]
        ids = [f"run{self._runs}-{number}" for number in range(len(asked))]
        numbers = {id: number for number, id in enumerate(ids)}
        coming, began, waited = 0, time.time(), 0.0
        steps: list[tuple[int, float]] = []
        while coming < len(asked) or scheduler.has_requests():
            now = time.time() - began
            while coming < len(asked) and at[coming] <= now:
                one, when = asked[coming], began + at[coming]
                ends = [] if one.whole else ENDS  # ignore_eos says nothing of these
                add(core, ids[coming], one.prompt, one.most, arrival=when, ignore_eos=one.whole, stop_token_ids=ends)
                coming += 1
            if not scheduler.has_requests():
                time.sleep(at[coming] - now)
                continue
            before, told, now = now, step(core), time.time() - began
            steps.append((self._tokens, now - before))
            if scheduler.get_request_counts()[1]:  # paused ones wait
                waited += now - before
            for id, (tokens, _) in told.items():
                if tokens:
                    served[numbers[id]].got(tokens, now)
        fell_back = scheduler.advice.status.why if getattr(scheduler, "fallen", False) else ""
        scheduler.shutdown()
        return Run(served, steps, waited / (time.time() - began), fell_back)

    def _scheduler(self, cell: Cell, ours: dict[str, Any] | None) -> Any:
        """A new one, as the engine would have made it."""
        from laps_sd_vllm import LapsSdScheduler

        own = self._core.scheduler
        config, memory = copy.copy(self._core.vllm_config), copy.copy(own.kv_cache_config)
        config.scheduler_config, config.cache_config = map(copy.copy, (config.scheduler_config, config.cache_config))
        config.scheduler_config.max_num_seqs = cell.seqs
        config.cache_config.num_gpu_blocks = memory.num_blocks = cell.blocks
        config.additional_config = {"laps_sd": ours} if ours is not None else {}
        kind = LapsSdScheduler if ours is not None else config.scheduler_config.get_scheduler_cls()
        return kind(
            vllm_config=config, kv_cache_config=memory, structured_output_manager=self._core.structured_output_manager,
            include_finished_set=False, log_stats=False, block_size=BLOCK, hash_block_size=BLOCK,
        )  # fmt: skip
