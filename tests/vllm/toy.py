"""A model runner without a model, for vLLM's own EngineCore. It believes nothing but what SchedulerOutput says, and
keeps token ids where a runner keeps keys and values, so that reading a wrong, stale or foreign block fails at once.
With it a scheduler runs thousands of steps in seconds, synchronous or not, in both runners' wire forms, with any
drafts.
"""

import random
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

HIT = 0.7  # chance that a draft token is right
NEVER = 5  # a token that `following` never gives: a wrong draft
LOOKS = 3  # tokens before it that say which one `following` gives
WINDOW = 96  # tokens, of the sliding window


def following(tokens: Sequence[int]) -> int:
    """The toy's greedy token."""
    return 10 + zlib.crc32(repr(tuple(tokens[-LOOKS:])).encode()) % 500


def continued(prompt: Sequence[int], count: int) -> list[int]:
    """The toy's greedy text."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(following(tokens))
    return tokens[len(prompt) :]


@dataclass
class Known:
    """A request as a runner knows it. `blocks`: of each group."""

    tokens: list[int]
    blocks: list[list[int]]
    computed: int
    drafts: list[int] = field(default_factory=list)


class ToyExecutor(Executor):
    """`groups`: kinds of KV blocks, from none; the second is of a sliding window."""

    supports_pp = True
    groups = 1

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def _init_executor(self) -> None:
        self.known: dict[str, Known] = {}
        self.kv: dict[tuple[int, int], tuple[int, int]] = {}  # (block, place) -> (group, token)
        self.rng = random.Random(7)
        self.v2 = self.vllm_config.use_v2_model_runner
        self.asynchronous = self.scheduler_config.async_scheduling
        self.most_drafts = self.vllm_config.num_speculative_tokens
        self.steps = 0
        self._pending: Any = None
        self._drafted: DraftTokenIds | None = None
        self._ran: set[str] = set()

    def check_health(self) -> None:
        pass

    def collective_rpc(self, method: Any, *args: Any, **kwargs: Any) -> list[Any]:
        size = self.cache_config.block_size
        shape = {"block_size": size, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        specs = {"full": FullAttentionSpec(**shape)} if self.groups else {}
        if self.groups == 2:
            specs["window"] = SlidingWindowSpec(**shape, sliding_window=WINDOW)
        answers: dict[Any, Any] = {
            "get_kv_cache_spec": specs,
            "determine_available_memory": 1 << 24,
            "get_supported_kv_cache_layouts": ["LBHNC", "LBNHC"],
        }
        return [answers.get(method)]

    def compile_or_warm_up_model(self) -> None:
        pass

    # ---- a step ----

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        self._pending = scheduler_output
        if scheduler_output.total_num_scheduled_tokens:
            return _done(None) if non_block else None
        self._forget(scheduler_output)
        empty = ModelRunnerOutput([], {})
        return _done(empty) if non_block else empty

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        output = self._run(self._pending)
        return _done(output) if non_block else output

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return self._drafted

    def _forget(self, step: Any) -> None:
        gone = set(step.finished_req_ids)
        if self.v2:
            gone |= set(step.preempted_req_ids or ())
        for id in gone:
            self.known.pop(id, None)

    def _run(self, step: Any) -> ModelRunnerOutput:
        self.steps += 1
        self._forget(step)
        self._learn(step)
        assert len(self.known) <= self.scheduler_config.max_num_seqs or not self.v2, "no row is left in the V2 runner"
        assert len(step.num_scheduled_tokens) <= self.scheduler_config.max_num_seqs, "more than the batch holds"
        ids = list(step.num_scheduled_tokens)
        sampled = [self._compute(id, count, step) for id, count in step.num_scheduled_tokens.items()]
        self._ran = set(ids)
        if self.most_drafts:
            drafts = [list(self.known[id].drafts) for id in ids]
            self._drafted = DraftTokenIds(ids, [[-1] * len(each) for each in drafts] if self.v2 else drafts)
        return ModelRunnerOutput(ids, {id: number for number, id in enumerate(ids)}, sampled_token_ids=sampled)

    def _learn(self, step: Any) -> None:
        """New requests, and what is told of the others."""
        for new in step.scheduled_new_reqs:
            tokens = new.prefill_token_ids if self.v2 else new.prompt_token_ids
            self.known[new.req_id] = Known(
                list(tokens), [list(each) for each in new.block_ids], new.num_computed_tokens
            )
        told = step.scheduled_cached_reqs
        for number, id in enumerate(told.req_ids):
            known, blocks = self.known[id], told.new_block_ids[number]
            if id in told.resumed_req_ids:
                known.blocks, known.computed = [list(each) for each in blocks], told.num_computed_tokens[number]
                known.drafts = []
            elif blocks is not None:
                for have, more in zip(known.blocks, blocks, strict=True):
                    have.extend(more)
            if not self.v2 and id not in self._ran:  # it left the batch, and its drafts with it
                if self.asynchronous:
                    known.drafts = []
                assert told.all_token_ids[id] == known.tokens, ("tokens sent again", id)
            if not self.asynchronous or (not self.v2 and id not in self._ran):
                assert known.computed == told.num_computed_tokens[number], ("computed tokens", id)

    def _compute(self, id: str, count: int, step: Any) -> list[int]:
        """The tokens that the request emits in this step."""
        known = self.known[id]
        slots = step.scheduled_spec_decode_tokens.get(id, [])
        kept_here = self.asynchronous or self.v2
        drafts = known.drafts[: len(slots)] if kept_here else list(slots)
        drafts += [-1] * (len(slots) - len(drafts))
        own = count - len(slots)
        text = known.tokens[known.computed : known.computed + own]
        assert len(text) == own, ("more scheduled than there is", id, own, len(text))
        self._read(id, known)
        self._write(id, known, text + drafts)
        if known.computed + own < len(known.tokens):
            known.computed += own
            known.drafts = []
            return []
        emitted: list[int] = []
        for draft in [*drafts, None]:
            emitted.append(self._next(id, known, emitted))
            if draft != emitted[-1]:
                break
        known.tokens += emitted
        known.computed += own + len(emitted) - 1
        known.drafts = self._propose(known.tokens, step.num_spec_tokens_to_schedule if self.most_drafts else 0)
        return emitted

    def _next(self, id: str, known: Known, emitted: list[int]) -> int:
        return following([*known.tokens[-LOOKS:], *emitted])

    def _read(self, id: str, known: Known) -> None:
        size = self.cache_config.block_size
        for group, blocks in enumerate(known.blocks):
            first = max(0, known.computed + 1 - WINDOW) if group else 0
            for position in range(first, known.computed):
                found = self.kv.get((blocks[position // size], position % size))
                assert found == (group, known.tokens[position]), ("KV", id, group, position, found)

    def _write(self, id: str, known: Known, tokens: Sequence[int]) -> None:
        size = self.cache_config.block_size
        for group, blocks in enumerate(known.blocks):
            for position, token in enumerate(tokens, known.computed):
                assert position // size < len(blocks), ("no block", id, group, position)
                assert blocks[position // size] != 0, ("the null block", id, group, position)
                self.kv[blocks[position // size], position % size] = group, token

    def _propose(self, tokens: Sequence[int], count: int) -> list[int]:
        drafts: list[int] = []
        last = tokens[-LOOKS:]
        for _ in range(count):
            right = following([*last, *drafts])
            drafts.append(right if self.rng.random() < HIT else NEVER)
        return drafts


class TwoGroups(ToyExecutor):
    groups = 2


class NoKv(ToyExecutor):
    groups = 0


class Ending(ToyExecutor):
    """Its texts end by themselves. It keeps no KV, and so does not look at blocks: that takes most of the others'
    time. `took` is told of the tokens that each step computes, in the middle of it, so that a clock may be moved."""

    lengths: ClassVar[dict[str, int]] = {}  # prompt and output tokens, by request
    took: ClassVar[Callable[[int], None]]
    end = 2

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        type(self).took(scheduler_output.total_num_scheduled_tokens)
        return super().execute_model(scheduler_output, non_block)

    def _next(self, id: str, known: Known, emitted: list[int]) -> int:
        over = len(known.tokens) + len(emitted) + 1 >= self.lengths[id]
        return self.end if over else super()._next(id, known, emitted)

    def _read(self, id: str, known: Known) -> None:
        pass

    def _write(self, id: str, known: Known, tokens: Sequence[int]) -> None:
        pass


def _done(value: Any) -> "Future[Any]":
    future: Future[Any] = Future()
    future.set_result(value)
    return future
