"""The drafter that is a small causal LM with KV of its own. Loading it is not done here."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from worker_service.engine.draft import Ask
from worker_service.engine.kv import KV
from worker_service.engine.target import Segment, Target

_CATCH_UP_TOKENS = 1024  # of all requests in one round: a long prompt must not hold up the others


@dataclass(slots=True)
class _State:
    """KV of the request's first `length` tokens and then of `drafts`, as far as they were fed."""

    kv: KV
    length: int = 0
    drafts: list[int] = field(default_factory=list)


class ModelDrafter:
    """Drafts greedily, the whole batch one token at a time.

    Its KV is a cache: who has not drafted for longest loses it when blocks run out, and whoever has too little of it
    catches up, over several rounds if need be, before drafting again. What texts begin with is shared as the target's
    KV is, by the same digests.
    """

    def __init__(self, model: Any, *, context_tokens: int, blocks: int, block_tokens: int) -> None:
        """`model`: a causal LM of the transformers library, in eval mode, that reads and writes the target's tokens.

        Where a request outgrows `context_tokens`, it goes on without drafts.
        """
        self._model = Target(model)
        self._context_tokens = context_tokens
        self._pool = self._model.new_pool(blocks, block_tokens)
        self._states: dict[str, _State] = {}  # the one used last is last

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        drafts: dict[str, list[int]] = {ask.request_id: [] for ask in asks}
        asks = [ask for ask in asks if len(ask.tokens) + ask.draft_len <= self._context_tokens]
        for ask in asks:
            self._reuse(ask)
        budget = _CATCH_UP_TOKENS
        ready: list[Ask] = []
        segments: list[Segment] = []
        for ask in asks:
            state = self._states[ask.request_id]
            missing = ask.tokens[state.length : state.length + budget]
            complete = state.length + len(missing) == len(ask.tokens)
            room_for = len(missing) + (ask.draft_len - 1 if complete else 0)
            # With one tokenizer the target may still have more ids: tables are filled up to sizes of their own.
            unknown = max(missing, default=0) >= self._model.vocab_size
            if not missing or unknown or not self._make_room(state.kv, room_for, drafts):
                continue
            budget -= len(missing)
            state.kv.extend(room_for)  # also for the drafts to come: nobody else may take it
            state.kv.truncate(state.length + len(missing))
            segments.append(Segment(state.kv, state.length, missing, len(missing) - complete))
            state.length += len(missing)
            state.kv.publish(ask.tokens)  # it is computed before anybody looks for it
            if complete:
                ready.append(ask)
        while segments:
            logits, _ = self._model.forward(segments)
            for ask, token in zip(ready, logits.argmax(-1).tolist(), strict=True):
                drafts[ask.request_id].append(token)
            ready = [ask for ask in ready if len(drafts[ask.request_id]) < ask.draft_len]
            segments = [self._feed(ask, drafts[ask.request_id][-1]) for ask in ready]
        return list(drafts.values())

    def observe(self, request_id: str, length: int, hidden: torch.Tensor) -> None:
        pass

    def rehearse(self, batch: int, draft_len: int) -> None:
        for _ in range(draft_len):
            caches = []
            for kv in (KV(self._pool) for _ in range(min(batch, self._pool.free_blocks))):
                kv.extend(1)
                caches.append(kv)
            self._model.forward([Segment(kv, 0, [0], 0) for kv in caches])
            for kv in caches:
                kv.release()

    def forget(self, request_id: str) -> None:
        state = self._states.pop(request_id, None)
        if state:
            state.kv.release()

    def _reuse(self, ask: Ask) -> None:
        """Keep what there is of KV and fits the tokens: drafts that were accepted need not be computed again, nor what
        others began with."""
        state = self._states.pop(ask.request_id, None) or _State(KV(self._pool, ask.salt))
        self._states[ask.request_id] = state
        for draft, token in zip(state.drafts, ask.tokens[state.length : -1], strict=False):
            if draft != token:
                break
            state.length += 1
        # The last token is computed in any case: its logits are the first draft.
        state.kv.truncate(min(state.length, len(ask.tokens) - 1))
        state.kv.adopt(ask.tokens)
        state.length = state.kv.length
        state.drafts = []

    def _make_room(self, kv: KV, tokens: int, in_use: dict[str, list[int]]) -> bool:
        while kv.room < tokens:
            idle = next((name for name in self._states if name not in in_use and self._states[name].kv.blocks), None)
            if idle is None:
                return False
            self.forget(idle)
        return True

    def _feed(self, ask: Ask, token: int) -> Segment:
        state = self._states[ask.request_id]
        start = state.kv.length
        state.kv.extend(1)
        state.drafts.append(token)
        return Segment(state.kv, start, [token], 0)
