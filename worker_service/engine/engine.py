"""The engine: admitted requests, and steps of draft and verify over them. No threads, no RPC, no clock but a stopwatch,
and no order of its own: each step is given a schedule."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from worker_service.engine import branches
from worker_service.engine.drafting.drafter import ALL, Drafter, Verified
from worker_service.engine.drafting.shielded import Shielded
from worker_service.engine.hooks import HOOKS, LogitsContext, LogitsHook
from worker_service.engine.host_pool import HostPool
from worker_service.engine.kv import KV
from worker_service.engine.length_head import LengthProbe
from worker_service.engine.matcher import Mask, StructureError
from worker_service.engine.pass_costs import PassCosts
from worker_service.engine.planning import Branch, Planner, Work, ask_of, seen
from worker_service.engine.proposals import Proposals
from worker_service.engine.request import EngineRequest
from worker_service.engine.sampler import Drawn, Sampler
from worker_service.engine.scoring import scored, with_prompt
from worker_service.engine.shape import longest_text
from worker_service.engine.stop import StopStrings
from worker_service.engine.structure import Masks, Structures
from worker_service.engine.target import Passed, Sharers, Target
from worker_service.engine.types import Admission, Finish, Held, Row, Run, Skip, StepResult


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
        max_prefill: int = 1024,
        max_draft: int = 8,
        drafter: Drafter,
        hooks: Sequence[LogitsHook] = HOOKS,
        group: Sharers | None = None,
        probe: LengthProbe | None = None,  # of this model
        attention: str = "auto",  # the kind of paged_attention
    ) -> None:
        """`model`: a causal LM of the transformers library, in eval mode; its attention function is replaced.

        `context_tokens` bounds prompt and output together. `blocks` of `block_tokens` tokens are the KV memory;
        `host_blocks` more can be offloaded to the host's memory. `max_prefill` bounds the tokens prefilled for all
        requests in a step, `max_draft` those drafted for one. `drafter` must be this engine's own. `group`: where
        `model` is this process's share, which it leads. Raises ValueError or NotImplementedError for a model whose
        attention asks for what the engine cannot do, or whose longer texts need other KV than its shorter ones, or
        that lacks the drafter's layers.
        """
        if context_tokens > (most := longest_text(model.config)):
            raise ValueError(f"it turns texts of more than {most} tokens by other frequencies; set kv_tokens to {most}")
        self.target = group.target(model) if group else Target(model)
        self.pool = self.target.new_pool(blocks, block_tokens, attention)
        self.host = HostPool(self.target, host_blocks)
        self.drafter, self._probe = Shielded(drafter), probe
        self._proposals = Proposals(self.target.vocab_size, self.target.forks)
        if drafter.layers:
            self.target.expose(drafter.layers)
        self._tokenizer = tokenizer.backend_tokenizer
        self._eos_ids, self._context_tokens, self._sampler = eos_ids, context_tokens, Sampler(hooks)
        self._planner = Planner(self.host, max_draft, max_prefill, self.drafter.late)
        on_host = self.target.device.type == "cpu"
        self._structures = Structures(self._tokenizer, self.target.vocab_size, eos_ids, few=on_host)
        self._requests: dict[str, EngineRequest] = {}

    @property
    def blocks(self) -> int:
        return self.pool.blocks

    @property
    def block_tokens(self) -> int:
        return self.pool.block_tokens

    @property
    def free_blocks(self) -> int:
        return self.pool.free_blocks

    @property
    def host_blocks(self) -> int:
        return self.host.blocks

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    def bind_thread(self, threads: int) -> None:
        """Give torch `threads` in the calling thread, 0: all cores. Torch keeps this number for each thread."""
        if threads:
            torch.set_num_threads(threads)

    def admit(self, admission: Admission) -> None:
        """Take a request. KV that the engine has of it already is cut to what agrees with its tokens.

        A request that cannot be run is taken too: its next row says why.
        """
        name = admission.request_id
        known = self._requests.pop(name, None)
        self.drafter.forget(name)
        output, grammar = admission.tokens[admission.prompt_len :], admission.sampling.grammar
        request = self._requests[name] = EngineRequest(
            admission,
            kv=KV(self.pool, admission.salt),
            stops=StopStrings(self._tokenizer, admission.limits.stop, output),
            eos_ids=self._eos_ids,
            context_tokens=self._context_tokens,
            matcher=self._structures.matcher(grammar, output) if grammar else None,
        )
        if known:
            request.keep(known)
        request.error = request.error or self._problem(request)
        if not request.error:
            self.drafter.expect(ask_of(request, 0))

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

    def forget(self, request_id: str) -> None:
        """Give back all that it holds: it has ended, or another worker runs it. Unknown ids are no error."""
        self.drop(request_id)
        self._requests.pop(request_id, None)
        if self._probe:
            self._probe.forget(request_id)

    def drop(self, request_id: str) -> None:
        """Give back its KV; when it runs again that is computed anew from its tokens. Unknown ids are no error."""
        if request := self._requests.get(request_id):
            self._release(request)

    def offload(self, request_id: str) -> None:
        """Move its KV to the host's memory until it runs again; if that is full, drop it. Unknown ids are no error."""
        if request := self._requests.get(request_id):
            self.host.save(request)

    def _release(self, request: EngineRequest) -> None:
        self.host.discard(request)
        request.kv.release()
        self.drafter.forget(request.id)

    def held(self) -> list[Held]:
        """All requests that were admitted and not forgotten, ended or not."""
        return [request.held() for request in self._requests.values()]

    def runnable(self, run: Run) -> bool:
        """Whether a step with this entry in its schedule could do something for the request."""
        request = self._requests.get(run.request_id)
        return request is not None and request.runnable(run.prefill_tokens)

    def weigh_drafts(self, costs: PassCosts | None) -> None:
        """See EnginePort."""
        self._proposals.costs = costs
        self.drafter.price(ALL)

    def rehearse_drafts(self, batch: int, draft_len: int) -> None:
        """See EnginePort."""
        with torch.inference_mode():
            self.drafter.rehearse(batch, draft_len)
        self.target.wait()

    def rehearse_offload(self, blocks: int) -> None:
        """See EnginePort."""
        kv = KV(self.pool)
        kv.extend(blocks * self.block_tokens)
        self.target.save("", kv.table)  # no request has this id
        self.target.restore("", 0, kv.table)
        self.target.discard("")
        self.target.wait()
        kv.release()

    def step(self, schedule: Sequence[Run], slots: int) -> StepResult:
        """Run the first `slots` runnable requests of `schedule`, best first: plan, draft, verify, accept.

        What is wrong with one request ends that request; an exception of the forward pass is the caller's to handle.
        """
        with torch.inference_mode():
            begun = perf_counter()
            plan = self._planner.plan(schedule, self._requests, slots)
            rows = [self._end(request) for request in plan.over]
            for skip, stopped in ((Skip.NO_BLOCKS, plan.skipped), (Skip.DEFERRED, plan.deferred)):
                rows += [request.row(request.output_tokens, skipped=skip) for request in stopped]
            draft_begun = perf_counter()
            self._proposals.draft(self.drafter, plan.work)
            verify_begun = perf_counter()
            wait_s, apart = self.drafter.waited_s, frozenset(self.drafter.apart)
            draft_s = verify_begun - draft_begun - wait_s
            asked = plan.masks
            # Masks need no logits: they are made during the pass.
            making = self._structures.begin(asked) if asked else None
            sequences = [work.sequence for work in plan.work]
            passed = self.target.forward(sequences + branches.sequences(plan.work)) if sequences else None
            verify_s = perf_counter() - verify_begun
            if passed is not None:
                masks = self._structures.take(making, asked) if making else {}
                rows += self._verify(plan.work, passed := scored(plan.work, passed), masks)
                if passed.clock:  # nobody has waited for the pass until its tokens were drawn
                    verify_s = passed.clock.seconds()
                if passed.states is not None:
                    read_begun = perf_counter()
                    self.drafter.read(seen(plan.work, sequences, passed.states))
                    draft_s += perf_counter() - read_begun
        times = draft_s, verify_s, perf_counter() - begun - draft_s - wait_s - verify_s, wait_s
        return StepResult(
            tuple(rows), self.pool.free_blocks, *times, apart, self.drafter.elsewhere, self.drafter.positions
        )

    def _end(self, request: EngineRequest) -> Row:
        """A request that ends without computing anything."""
        request.finish = Finish.ERROR if request.error else Finish.LENGTH
        self._release(request)
        return request.row(request.output_tokens)

    def _verify(self, works: Sequence[Work], passed: Passed, masks: Masks) -> list[Row]:
        """Keep the drafts that the target agrees with, and its own token after them.

        `passed`: in the works' order num_logits of each, then those of branches. `masks`: by request, what its
        structure allows.
        """
        asked = [self._context(work, masks.get(work.request.id)) for work in works if work.num_logits]
        own = iter(self._sampler.draw(passed.logits, asked))
        drawn = branches.follow(
            works, [next(own) if work.num_logits else Drawn() for work in works], passed, self._draw
        )
        branches.prune(works)
        rows, verified, begins, begin = [], [], [], 0
        for work, found in zip(works, drawn, strict=True):
            begins.append(begin)
            row = self._accept(work, found, masks.get(work.request.id))
            if row.tokens and row.finish is None:
                hidden = passed.hidden[begin + len(row.tokens) - 1]
                verified.append(Verified(row.request_id, work.request.tokens, hidden, work.ask.local))
            rows.append(with_prompt(row, work.request, passed.hidden, begin))
            begin += work.num_logits
        self.drafter.verified(verified)
        return self._probe.told(rows, begins, passed.hidden) if self._probe else rows

    def _context(self, work: Work, mask: Mask | StructureError | None) -> LogitsContext:
        own, (bits, few) = work.request, mask if isinstance(mask, Mask) else (None, ())
        about = own.sampling, own.limits, self._eos_ids, bits, few, own.counted
        return LogitsContext(own.tokens, work.drafts, own.output_tokens, *about)

    def _draw(self, logits: torch.Tensor, asked: Sequence[tuple[Work, Branch]]) -> list[Drawn]:
        """What follows the first token of each branch."""
        return self._sampler.draw(logits, [self._context(work, None).after(branch.tokens) for work, branch in asked])

    def _accept(self, work: Work, drawn: Drawn, mask: Mask | StructureError | None) -> Row:
        """As _verify, for one request."""
        request, start, sampled = work.request, work.request.output_tokens, drawn.tokens
        if isinstance(mask, StructureError):
            request.error, sampled = str(mask), ()
        elif work.num_logits and not sampled:
            request.error = "logits: not finite with structure, min_tokens, bias and penalties, or by the model itself"
        if request.error:
            request.finish = Finish.ERROR
        emitted = request.extend(sampled)
        request.kv.truncate(len(request.tokens) - 1)
        request.kv.publish(request.tokens)
        if request.finish is not None:
            self._release(request)
        return request.row(
            start,
            tokens=tuple(emitted),
            drafted=len(work.drafts),
            branched=sum(len(branch.tokens) for branch in work.branches),
            accepted=min(max(len(sampled) - 1, 0), len(emitted)),
            prefilled=work.prefilled,
            logprobs=drawn.logprobs[: len(emitted)],
        )
