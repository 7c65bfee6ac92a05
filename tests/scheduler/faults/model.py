"""Workers whose model is arithmetic: what a request's output must be is known, and its KV is counted, not computed. The
worker's own runner and link decide when it runs."""

import asyncio
import random
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from worker_service.engine.pass_costs import PassCosts
from worker_service.engine.request import EngineRequest, Saved
from worker_service.engine.types import Admission, CostProfile, Held, Row, Run, Skip, StepResult
from worker_service.runner import Runner

EOS = 0
BLOCK_TOKENS = 4
COST = CostProfile(draft_s=0.001, verify_s=0.01, verify_slope_s=0.001, prefill_token_s=0.0005, verify_token_s=0.0)


def token_at(prompt: Sequence[int], position: int) -> int:
    """The target's output: a prompt begins with its number and the length of its answer."""
    number, length = prompt[0], prompt[1]
    return EOS if position == length - 1 else 1 + (number * 7_919 + position * 104_729) % 50_000


def answer(prompt: Sequence[int], most: int) -> list[int]:
    """The whole of it."""
    return [token_at(prompt, position) for position in range(min(prompt[1], most))]


class _Length:
    """KV without the tensors."""

    def __init__(self) -> None:
        self.length = 0

    @property
    def blocks(self) -> int:
        return -(-self.length // BLOCK_TOKENS)

    private_blocks = used_blocks = blocks


class _NoStops:
    def push(self, token: int) -> bool:
        return False


class CountingEngine:
    """In place of worker_service.engine.Engine: the same rows, of numbers. `wrong` is told of a history that the model
    did not write."""

    def __init__(
        self, blocks: int, host_blocks: int, max_draft: int, rng: random.Random, wrong: Callable[[str], None]
    ) -> None:
        self.blocks, self.host_blocks, self._max_draft = blocks, host_blocks, max_draft
        self.requests: dict[str, EngineRequest] = {}
        self._rng, self._wrong = rng, wrong

    @property
    def free_blocks(self) -> int:
        return self.blocks - sum(request.kv.blocks for request in self.requests.values())  # type: ignore[misc]

    @property
    def _free_host_blocks(self) -> int:
        return self.host_blocks - sum(r.saved.blocks for r in self.requests.values() if r.saved)

    def weigh_drafts(self, costs: PassCosts | None) -> None:
        """Its drafts are drawn, whatever they cost."""

    def admit(self, admission: Admission) -> None:
        name, tokens, limits = admission.request_id, admission.tokens, admission.limits
        prompt, output = tokens[: admission.prompt_len], list(tokens[admission.prompt_len :])
        if output != answer(prompt, limits.max_tokens)[: len(output)]:
            self._wrong(f"{name} was admitted with output that no model wrote: {output}")
        known = self.requests.pop(name, None)
        kv = known.kv if known else _Length()
        request = EngineRequest(
            admission,
            kv=kv,  # type: ignore[arg-type]
            stops=_NoStops(),  # type: ignore[arg-type]
            eos_ids=frozenset({EOS}),
            context_tokens=self.blocks * BLOCK_TOKENS,
        )
        if known:
            agreed = min(len(known.tokens), len(tokens), len(tokens) - 1)
            kv.length = min(kv.length, agreed)  # type: ignore[misc]
            if known.saved:
                request.saved = Saved(known.saved.blocks, min(known.saved.length, agreed))
        self.requests[name] = request

    def forget(self, request_id: str) -> None:
        self.requests.pop(request_id, None)

    def drop(self, request_id: str) -> None:
        if request := self.requests.get(request_id):
            request.kv.length, request.saved = 0, None  # type: ignore[misc]

    def offload(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request is None or request.saved or not request.kv.length:
            return
        blocks: int = request.kv.blocks  # type: ignore[assignment]
        if blocks <= self._free_host_blocks:
            request.saved = Saved(blocks, request.kv.length)
        request.kv.length = 0  # type: ignore[misc]

    def held(self) -> list[Held]:
        return [request.held() for request in self.requests.values()]

    def runnable(self, run: Run) -> bool:
        request = self.requests.get(run.request_id)
        return request is not None and request.runnable(run.prefill_tokens)

    def step(self, runs: Sequence[Run], slots: int) -> StepResult:
        rows: list[Row] = []
        ran = skipped = 0
        for run in runs:
            if ran == slots or skipped == slots:
                break
            if not self.runnable(run):
                continue
            row = self._row(self.requests[run.request_id], run, waits=skipped > 0)
            rows.append(row)
            ran += row.skipped is None
            skipped += row.skipped is not None
        return StepResult(tuple(rows), self.free_blocks, 0.001, 0.009, 0.0)

    def _row(self, request: EngineRequest, run: Run, *, waits: bool) -> Row:
        start, kv = request.output_tokens, request.kv
        room = -kv.length % BLOCK_TOKENS + (0 if waits else self.free_blocks * BLOCK_TOKENS)
        if request.saved and request.saved.length < room:
            kv.length = request.saved.length  # type: ignore[misc]
            room -= request.saved.length
            request.saved = None
        if room <= 0 or request.saved:
            return request.row(start, skipped=Skip.NO_BLOCKS)
        prefill = min(request.num_uncomputed, run.prefill_tokens, room)
        missing = len(request.tokens) - kv.length
        if request.num_uncomputed > 0 and not (prefill == request.num_uncomputed and missing <= room):
            kv.length += prefill  # type: ignore[misc]
            return request.row(start, prefilled=prefill)
        drafted = 0 if prefill else max(0, min(run.draft_len, self._max_draft, request.remaining_tokens - 1, room - 1))
        accepted = self._rng.randint(0, drafted)
        prompt = request.tokens[: request.prompt_len]
        emitted = request.extend([token_at(prompt, start + i) for i in range(accepted + 1)])
        kv.length = 0 if request.finish else len(request.tokens) - 1  # type: ignore[misc]
        accepted = min(accepted, len(emitted))
        return request.row(start, tokens=tuple(emitted), drafted=drafted, accepted=accepted, prefilled=prefill)


class _Idle(BaseException):
    """The runner has nothing to run: its thread would wait now."""


class _Turnstile:
    """In place of the condition that the model's thread waits on."""

    def __init__(self, notify: Callable[[], object]) -> None:
        self.notify = notify

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def wait_for(self, news: Callable[[], bool]) -> None:
        if not news():
            raise _Idle


class VirtualRunner(Runner):
    """The worker's runner; its thread's turns are timers of the loop."""

    def __init__(self, engine: CountingEngine, slots: int, round_s: Callable[[], float]) -> None:
        super().__init__(engine, slots, 0)  # type: ignore[arg-type]
        self._loop = asyncio.get_running_loop()
        self._wake = _Turnstile(lambda: self._loop.call_soon(self._turn))  # type: ignore[assignment]
        self._costs = _FixedCosts()  # type: ignore[assignment]
        self._round_s = round_s
        self._busy = False

    def _turn(self) -> None:
        if self._busy:
            return  # the round in hand ends first
        try:
            step = self._next_step(self._loop.time())
        except _Idle:
            return
        assert step is not None
        self._busy = True
        self._loop.call_later(self._round_s(), self._ended_step, step)

    def _ended_step(self, step: Any) -> None:
        self._busy = False
        self._done(step, self._engine.step(step.command.schedule, self.slots), self._loop.time())
        self._turn()


class _FixedCosts:
    """In place of the cost model: nothing is learned."""

    profile, passes = COST, None

    def observe(self, result: StepResult) -> None:
        return
