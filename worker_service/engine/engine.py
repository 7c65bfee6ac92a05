"""The engine: admitted requests, and rounds of draft and verify over them. No threads, no clocks but its stopwatch, no
RPC, no order of its own: each round is given a ranking."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from time import perf_counter
from typing import Any

import torch

from worker_service.engine.draft import Ask, Drafter
from worker_service.engine.hooks import HOOKS, LogitsContext, LogitsHook
from worker_service.engine.kv import KV
from worker_service.engine.parallel import Group, SharedTarget
from worker_service.engine.request import EngineRequest, Saved
from worker_service.engine.sampling import logprobs, verify
from worker_service.engine.stop import StopStrings
from worker_service.engine.target import Segment, Target
from worker_service.engine.types import Finish, Held, Limits, Row, Run, Sampling, Skip, StepResult

_REHEARSAL = ""  # no request's id


@dataclass(slots=True)
class _Work:
    """What one request does in one round: compute those of its tokens that have no KV yet, and then its drafts."""

    request: EngineRequest
    own: list[int]
    draft_len: int  # at most so many drafts: there is KV for them
    prefilled: int
    samples: bool  # false: a chunk of prefill that others will follow
    drafts: list[int] = field(default_factory=list)

    @property
    def feed(self) -> list[int]:
        return self.own + self.drafts

    @property
    def draws(self) -> int:
        return len(self.drafts) + 1 if self.samples else 0


class Engine:
    """Not thread-safe: construct it anywhere, then use it from the model's thread alone."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        eos_ids: frozenset[int],
        context_tokens: int,
        blocks: int,
        block_tokens: int = 64,
        host_blocks: int = 0,
        round_tokens: int = 1024,
        max_draft: int = 8,
        drafter: Drafter,
        hooks: Sequence[LogitsHook] = HOOKS,
        group: Group | None = None,
    ) -> None:
        """`model`: a causal LM of the transformers library, in eval mode; its attention function is replaced.

        `drafter` must be this engine's own; `context_tokens` bounds prompt and output together. `host_blocks` of KV
        can be offloaded to the host's memory at a time; `round_tokens` bounds the prefill of all requests in a round.
        `group`: where `model` is this process's share of one, which it leads.
        """
        self._target = SharedTarget(model, group) if group else Target(model)
        self._tokenizer = tokenizer.backend_tokenizer
        self._eos_ids, self._context_tokens = eos_ids, context_tokens
        self._pool = self._target.new_pool(blocks, block_tokens)
        self.host_blocks = self._free_host_blocks = host_blocks
        self._round_tokens = round_tokens
        self._max_draft = max_draft
        self._drafter = drafter
        self._hooks = tuple(hooks)
        self._requests: dict[str, EngineRequest] = {}

    @property
    def blocks(self) -> int:
        return self._pool.blocks

    @property
    def free_blocks(self) -> int:
        return self._pool.free_blocks

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._pool.block_tokens)

    @property
    def vocab_size(self) -> int:
        return self._target.vocab_size

    def bind_thread(self, threads: int) -> None:
        """Give torch `threads` in the calling thread, 0: all cores. Torch keeps this number for each thread."""
        if threads:
            torch.set_num_threads(threads)

    def logits_in_two_passes(self, tokens: Sequence[int], first: int) -> torch.Tensor:
        """[n, vocabulary], of a text whose first part is computed before the rest. Nothing is kept: it is a check."""
        kv, parts = KV(self._pool), []
        for part in (tokens[:first], tokens[first:]):
            start = kv.length
            kv.extend(len(part))
            parts.append(self._target.forward([Segment(kv, start, part, 0)])[0].clone())
        kv.release()
        return torch.cat(parts)

    def rehearse_drafts(self, batch: int, draft_len: int) -> None:
        """The drafter's work for a round, without a request: to be timed at warm-up."""
        with torch.inference_mode():
            self._drafter.rehearse(batch, draft_len)

    def rehearse_offload(self, blocks: int) -> None:
        """The copies of offloading so much KV and bringing it back, without a request: to be timed at warm-up."""
        kv = KV(self._pool)
        kv.extend(blocks * self._pool.block_tokens)
        self._target.save(_REHEARSAL, kv)
        self._target.restore(_REHEARSAL, kv)
        self._target.discard(_REHEARSAL)
        kv.release()

    def admit(
        self,
        request_id: str,
        placement: int,
        tokens: Sequence[int],
        prompt_len: int,
        sampling: Sampling,
        limits: Limits,
        salt: str = "",
    ) -> None:
        """Take a request, with all its `tokens` so far: the truth. KV of one that is known, offloaded or not, is cut to
        what agrees.

        KV of what texts begin with is shared among requests of equal `salt`, and no others. A request that cannot be
        run is taken too: its next row says why.
        """
        known = self._requests.pop(request_id, None)
        self._drafter.forget(request_id)
        kv = known.kv if known else KV(self._pool, salt)
        if known:
            agreed = next(
                (i for i, (a, b) in enumerate(zip(known.tokens, tokens, strict=False)) if a != b), len(tokens)
            )
            agreed = max(min(agreed, len(tokens) - 1), 0)
            kv.truncate(agreed)
            if known.saved:
                known.saved.length = min(known.saved.length, agreed)
        request = EngineRequest(
            request_id,
            placement,
            tokens,
            prompt_len,
            sampling,
            limits,
            salt=salt,
            kv=kv,
            stops=StopStrings(self._tokenizer, limits.stop, tokens[prompt_len:]),
            eos_ids=self._eos_ids,
            context_tokens=self._context_tokens,
        )
        request.saved = known.saved if known else None
        request.error = self._problem(request)
        self._requests[request_id] = request

    def forget(self, request_id: str) -> None:
        """Finished, cancelled or moved: give back all it holds. Unknown ids are no error."""
        self.drop(request_id)
        self._requests.pop(request_id, None)

    def drop(self, request_id: str) -> None:
        """Give back its KV; when it runs again it is rebuilt from its tokens. Unknown ids are no error."""
        request = self._requests.get(request_id)
        if request:
            self._release(request)

    def offload(self, request_id: str) -> None:
        """Move its KV to the host's memory until it runs again; if that is full, drop it. Unknown ids are no error."""
        request = self._requests.get(request_id)
        if request is None or request.saved or not request.kv.length:
            return
        if request.kv.used_blocks <= self._free_host_blocks:
            self._target.save(request.id, request.kv)
            request.saved = Saved(request.kv.used_blocks, request.kv.length)
            self._free_host_blocks -= request.saved.blocks
        request.kv.release()

    def _release(self, request: EngineRequest) -> None:
        self._discard_saved(request)
        request.kv.release()
        self._drafter.forget(request.id)

    def _discard_saved(self, request: EngineRequest) -> None:
        if request.saved:
            self._target.discard(request.id)
            self._free_host_blocks += request.saved.blocks
            request.saved = None

    def held(self) -> list[Held]:
        """All that is admitted and not forgotten, finished or not."""
        return [
            Held(
                r.id,
                r.placement,
                r.output_tokens,
                blocks=r.kv.private_blocks,
                offloaded=r.saved.blocks if r.saved else 0,
                prefill_owed=max(r.prefill_owed, 0),
            )
            for r in self._requests.values()
        ]

    def runnable(self, run: Run) -> bool:
        """Whether a round with this place of a ranking could do something."""
        request = self._requests.get(run.request_id)
        if request is None or request.finish is not None:
            return False
        return bool(request.error) or request.prefill_owed <= 0 or run.prefill_tokens > 0

    def step(self, runs: Sequence[Run], slots: int) -> StepResult:
        """One round of the first `slots` runnable requests of a ranking, best first: plan, verify, accept.

        Errors of one request end that request; an exception of the forward pass is the caller's to handle.
        """
        with torch.inference_mode():
            begun = perf_counter()
            work, rows = self._plan(runs, slots)
            draft_begun = perf_counter()
            self._draft(work)
            verify_begun = perf_counter()
            draft_s = verify_begun - draft_begun
            segments = [
                Segment(w.request.kv, w.request.kv.length - len(w.feed), w.feed, len(w.feed) - w.draws) for w in work
            ]
            passed = self._target.forward(segments) if work else None
            verify_s = perf_counter() - verify_begun
            if passed is not None:
                rows += self._verify(work, *passed)
            other_s = perf_counter() - begun - draft_s - verify_s
        return StepResult(tuple(rows), self._pool.free_blocks, draft_s, verify_s, other_s)

    def _plan(self, runs: Sequence[Run], slots: int) -> tuple[list[_Work], list[Row]]:
        """Who runs what, with KV for it; rows of those that cannot run."""
        work: list[_Work] = []
        rows: list[Row] = []
        skipped = 0
        budget = self._round_tokens
        for run in {run.request_id: run for run in runs}.values():
            if len(work) == slots or skipped == slots:
                break
            if not self.runnable(run):
                continue
            request = self._requests[run.request_id]
            if request.error or request.left <= 0:
                request.finish = Finish.ERROR if request.error else Finish.LENGTH
                self._release(request)
                rows.append(self._row(request, request.output_tokens))
                continue
            self._resume(request)
            # Once one had to wait for blocks, those ranked lower must not take any.
            room = request.kv.own_room if skipped else request.kv.room
            if room <= 0 or request.saved:
                skipped += 1
                rows.append(self._row(request, request.output_tokens, skipped=Skip.NO_BLOCKS))
                continue
            prefill = min(max(request.prefill_owed, 0), run.prefill_tokens, room, budget)
            if prefill or request.prefill_owed <= 0:
                budget -= prefill
                work.append(self._work(request, run, prefill, room))
        return work, rows

    def _resume(self, request: EngineRequest) -> None:
        """Begin as others began, and bring back what was offloaded, if there is place for it and one token more."""
        kv, saved = request.kv, request.saved
        if saved and saved.length >= kv.room:
            return
        kv.adopt(request.tokens)
        if saved:
            shared = kv.blocks
            kv.extend(max(saved.length - kv.length, 0))
            self._target.restore(request.id, kv, shared)
            self._discard_saved(request)

    def _work(self, request: EngineRequest, run: Run, prefill: int, room: int) -> _Work:
        tokens = request.tokens[request.kv.length :]
        samples, draft_len = True, 0
        if request.prefill_owed > 0:
            # The last token of output, if there is one, comes along with the end of the prefill.
            samples = prefill == request.prefill_owed and len(tokens) <= room
            tokens = tokens if samples else tokens[:prefill]
        else:
            draft_len = max(min(run.draft_len, self._max_draft, request.left - 1, room - 1), 0)
        request.kv.extend(len(tokens) + draft_len)
        return _Work(request, tokens, draft_len, prefill, samples)

    def _draft(self, work: Sequence[_Work]) -> None:
        """One call of the drafter for all; KV that was reserved for drafts and is not needed is given up."""
        drafting = [w for w in work if w.draft_len]
        if not drafting:
            return
        asks = [Ask(w.request.id, w.request.tokens, w.draft_len, w.request.salt) for w in drafting]
        for w, drafts in zip(drafting, self._drafter.propose(asks), strict=True):
            # A draft model may have more ids than the target, as in draft_model.py.
            w.drafts = list(takewhile(lambda token: token < self.vocab_size, drafts[: w.draft_len]))
            w.request.kv.truncate(w.request.kv.length - w.draft_len + len(w.drafts))

    def _verify(self, work: Sequence[_Work], logits: torch.Tensor, hidden: torch.Tensor) -> list[Row]:
        """Keep the drafts that the target agrees with, and its own token after them.

        `logits`, `hidden`: [draws, vocabulary] and [draws, hidden size], of all works in order.
        """
        rows = []
        begin = 0
        for w in work:
            request, start = w.request, w.request.output_tokens
            own, first = logits[begin : begin + w.draws], begin
            begin += w.draws
            sampled: list[int] = []
            raw: torch.Tensor | None = None
            if w.draws:
                if request.sampling.logprobs is not None:
                    raw = own.log_softmax(-1)  # before the hooks, which may write into the logits
                context = LogitsContext(
                    request.tokens, w.drafts, start, request.sampling, request.limits, self._eos_ids
                )
                for hook in self._hooks:
                    own = hook(own, context)
                sampled = verify(own, w.drafts, request.sampling, start)
                if not sampled:
                    request.error = "logits: with bias and penalties they are not finite, so no token can be drawn"
                    request.finish = Finish.ERROR
            emitted = request.extend(sampled)
            request.kv.truncate(len(request.tokens) - 1)
            request.kv.publish(request.tokens)
            if request.finish is not None:
                self._release(request)
            elif sampled:
                self._drafter.observe(request.id, len(request.tokens), hidden[first + len(sampled) - 1])
            rows.append(
                self._row(
                    request,
                    start,
                    tokens=tuple(emitted),
                    drafted=len(w.drafts),
                    accepted=min(max(len(sampled) - 1, 0), len(emitted)),
                    prefilled=w.prefilled,
                    logprobs=() if raw is None else logprobs(raw, emitted, request.sampling.logprobs or 0),
                )
            )
        return rows

    @staticmethod
    def _row(request: EngineRequest, start: int, **fields: Any) -> Row:
        owed = 0 if request.finish else max(request.prefill_owed, 0)
        return Row(
            request.id,
            request.placement,
            start,
            blocks=request.kv.private_blocks,
            prefill_owed=owed,
            finish=request.finish,
            error=request.error,
            **fields,
        )

    def _problem(self, request: EngineRequest) -> str:
        """Why it cannot be run; empty if it can."""
        if not 0 < request.prompt_len <= len(request.tokens):
            return f"tokens: {len(request.tokens)} cannot begin with a prompt of {request.prompt_len}"
        for name, tokens in (("tokens", request.tokens), ("logit_bias", [i for i, _ in request.sampling.logit_bias])):
            strange = next((token for token in tokens if not 0 <= token < self.vocab_size), None)
            if strange is not None:
                return f"{name}: {strange} is not in the vocabulary of {self.vocab_size}"
        if request.prompt_len >= self._context_tokens:
            return f"tokens: a prompt of {request.prompt_len} leaves no place in a context of {self._context_tokens}"
        return ""
