"""Which requests of a schedule run in a step, and on which of their tokens. Nothing is computed here."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from worker_service.engine.drafting.drafter import Ask, Seen
from worker_service.engine.host_pool import HostPool
from worker_service.engine.kv import Fork
from worker_service.engine.ready_first import ReadyFirst
from worker_service.engine.request import EngineRequest
from worker_service.engine.structure import Asked
from worker_service.engine.target import InputSequence
from worker_service.engine.types import Run

SCORED = 128  # tokens of prompts whose log-probabilities are told, in a step: each needs logits of the whole vocabulary


@dataclass(slots=True)
class Branch:
    """Drafts of a request that begin with another token than its others do, and the KV for them."""

    tokens: Sequence[int]
    fork: Fork
    followed: bool = False  # the fork has become the request's KV


@dataclass(slots=True)
class Work:
    """What one request does in one step: compute those of its own tokens that have no KV yet, and then its drafts."""

    request: EngineRequest
    uncomputed: list[int]
    draft_len: int  # at most so many drafts: there is KV for them
    prefilled: int
    samples: bool  # False: a part of the prefill that does not reach its end
    here: bool = False  # as in Run
    scored: int = 0  # tokens of the prompt whose log-probabilities it tells
    drafts: list[int] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)  # none is longer than `drafts`

    @property
    def num_logits(self) -> int:
        """Tokens that the target samples: one after each draft, and one before."""
        return len(self.drafts) + 1 if self.samples else 0

    @property
    def ask(self) -> Ask:
        return ask_of(self.request, self.draft_len, self.here)

    @property
    def sequence(self) -> InputSequence:
        """The target's input. The request's KV has been extended for it already."""
        kv, input_ids = self.request.kv, self.uncomputed + self.drafts
        logits_from = len(input_ids) - self.num_logits - self.scored
        return InputSequence(kv, kv.length - len(input_ids), input_ids, logits_from)

    @property
    def drafts_from(self) -> int:
        """The position of its first draft, once its KV is that of its drafts."""
        return self.request.kv.length - len(self.drafts)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`over` are requests that end without computing anything; for the `skipped` there are no free blocks of KV; the
    `deferred` wait for drafts while others run."""

    work: Sequence[Work]
    over: Sequence[EngineRequest]
    skipped: Sequence[EngineRequest]
    deferred: Sequence[EngineRequest] = ()

    @property
    def masks(self) -> dict[str, Asked]:
        """Those that the step needs, once its drafts are known."""
        return {
            work.request.id: Asked(work.request.matcher, work.drafts)
            for work in self.work
            if work.request.matcher and work.num_logits
        }


def ask_of(request: EngineRequest, draft_len: int, here: bool = False) -> Ask:
    """What `request` asks of the drafter; `here`: as in Run."""
    return Ask(request.id, request.tokens, draft_len, request.salt, here or request.local_drafts)


class Planner:
    """Serves the first requests of a schedule that can run, with KV for all that they will compute."""

    def __init__(
        self, host: HostPool, max_draft: int, max_prefill: int, late: Callable[[Sequence[Ask]], dict[str, bool]]
    ) -> None:
        """`max_draft`: tokens drafted for one request in a step; `max_prefill`: tokens prefilled for all together.
        `late`: as in Drafter."""
        self._host, self._max_draft, self._max_prefill, self._late = host, max_draft, max_prefill, late
        self._ready_first = ReadyFirst()

    def plan(self, schedule: Iterable[Run], requests: Mapping[str, EngineRequest], slots: int) -> StepPlan:
        """At most `slots` requests of `schedule`, best first. Unknown ids do not count; of equal ids the last does."""
        work: list[Work] = []
        over: list[EngineRequest] = []
        skipped: list[EngineRequest] = []
        budget, scored = self._max_prefill, SCORED
        able = [
            (run, request)
            for run in {run.request_id: run for run in schedule}.values()
            if (request := requests.get(run.request_id)) is not None and request.runnable(run.prefill_tokens)
        ]
        # One whose grammar is still being compiled is waited for only where there is nothing else to do.
        able = [(run, request) for run, request in able if request.ready] or able
        first = {run.request_id for run, _ in able[:slots]}  # they are tried in any case: who yielded, too
        for run, request in self._in_order(able, slots):
            if len(work) == slots or (len(skipped) >= slots and request.id not in first):
                break
            if request.error or request.remaining_tokens <= 0:
                over.append(request)
                continue
            if request.num_uncomputed and (not budget or (request.scores and not scored)):
                continue  # no prefill is left for it; without a row nobody would hear of blocks that it shares
            # Once a request had to be skipped for want of blocks, those listed after it must not take any.
            if not skipped:
                self._resume(request)
            room = request.kv.own_room if skipped else request.kv.room
            if room <= 0 or request.saved:
                skipped.append(request)
                continue
            prefill = min(request.num_uncomputed, run.prefill_tokens, room, budget)
            if request.scores:
                prefill = min(prefill, scored)
                scored -= prefill
            if prefill or not request.num_uncomputed:
                budget -= prefill
                work.append(self._work(request, run, prefill, room))
        untried = [request.id for _, request in able if request not in over and request not in skipped]
        waiting = self._ready_first.ran([one.request.id for one in work], untried)
        return StepPlan(work, over, skipped, [requests[id] for id in waiting])

    def _in_order(self, able: list[tuple[Run, EngineRequest]], slots: int) -> list[tuple[Run, EngineRequest]]:
        """Those that may run, in the order in which they are tried."""
        yields = {run.request_id for run, _ in able if run.yields}
        late: dict[str, bool] = {}
        if yields and len(able) > slots:
            drafting = [(run, one) for run, one in able if run.yields and run.draft_len and not one.num_uncomputed]
            late = self._late([ask_of(one, run.draft_len, run.here) for run, one in drafting])
        pairs = {run.request_id: (run, request) for run, request in able}
        return [pairs[id] for id in self._ready_first.order(list(pairs), slots, yields, late)]

    def _resume(self, request: EngineRequest) -> None:
        """Share blocks of others that begin with the same text, unless that is to be scored; bring back offloaded KV if
        one more token has room."""
        if request.saved and request.saved.length >= request.kv.room:
            return
        if not request.scores:
            request.kv.adopt(request.tokens)
        if request.saved:
            self._host.restore(request)

    def _work(self, request: EngineRequest, run: Run, prefill: int, room: int) -> Work:
        tokens = request.tokens[request.kv.length :]
        samples, draft_len = True, run.draft_len
        if request.num_uncomputed:
            # The last token of output, if there is one, comes along with the end of the prefill.
            samples = prefill == request.num_uncomputed and len(tokens) <= room
            tokens = tokens if samples else tokens[:prefill]
            draft_len = 0
        else:
            draft_len = max(min(draft_len, self._max_draft, request.remaining_tokens - 1, room - 1), 0)
        scored = request.to_score(request.kv.length + len(tokens))
        request.kv.extend(len(tokens) + draft_len)
        return Work(request, tokens, draft_len, prefill, samples, run.here, scored)


def seen(works: Sequence[Work], sequences: Sequence[InputSequence], states: torch.Tensor) -> list[Seen]:
    """What the target knew at the tokens of `sequences` that turned out right, of requests that go on.

    `states` [T, ...]: of all tokens of the pass, in the order of `works` and `sequences`."""
    result, begin = [], 0
    for work, sequence in zip(works, sequences, strict=True):
        if work.request.finish is None:
            right = work.request.kv.length - sequence.start  # rejected drafts have lost their KV
            result.append(Seen(work.ask, sequence.start, states[begin : begin + right]))
        begin += len(sequence.tokens)
    return result
