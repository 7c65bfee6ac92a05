"""The drafter that is a small causal LM with KV of its own. It is not loaded here."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from worker_service.engine.drafting.drafter import Ask, Drafter
from worker_service.engine.kv import KV
from worker_service.engine.shape import longest_text
from worker_service.engine.target import InputSequence, Target

_CATCH_UP_TOKENS = 1024  # computed for all requests in one step: a long prompt must not hold up the others


@dataclass(slots=True)
class _State:
    """KV of a request's first `length` tokens, and behind them of those of its last `drafts` that were computed."""

    kv: KV
    length: int = 0
    drafts: list[int] = field(default_factory=list)


class ModelDrafter(Drafter):
    """Drafts greedily, one token at a time for the whole batch.

    Its KV is a cache. When blocks run out, the request that has not drafted for longest loses its own. A request with
    too little KV catches up before it drafts again, over several steps if need be. KV of equal beginnings of texts is
    shared as the target's is (kv.py).
    """

    def __init__(
        self, model: Any, *, context_tokens: int, blocks: int, block_tokens: int, attention: str = "auto"
    ) -> None:
        """`model`: a causal LM of the transformers library, in eval mode, that reads and writes the target's tokens.

        A request that outgrows `context_tokens` goes on without drafts. `blocks` of `block_tokens` tokens are the KV
        memory. `attention`: the kind of paged_attention.
        """
        self._model = Target(model)
        self._context_tokens = min(context_tokens, longest_text(model.config))
        self._pool = self._model.new_pool(blocks, block_tokens, attention)
        self._states: dict[str, _State] = {}  # the one used last is last

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        drafts: dict[str, list[int]] = {ask.request_id: [] for ask in asks}
        self.positions = 0
        chances: dict[str, list[float]] = {ask.request_id: [] for ask in asks}
        asks = [ask for ask in asks if len(ask.tokens) + ask.draft_len <= self._context_tokens]
        for ask in asks:
            self._reuse(ask)
        budget = _CATCH_UP_TOKENS
        ready: list[Ask] = []
        sequences: list[InputSequence] = []
        computed: list[tuple[KV, Sequence[int]]] = []
        for ask in asks:
            state = self._states[ask.request_id]
            missing = ask.tokens[state.length : state.length + budget]
            complete = state.length + len(missing) == len(ask.tokens)
            room_for = len(missing) + (ask.draft_len - 1 if complete else 0)
            # The target may have more ids, even with the same tokenizer: models round up the sizes of their tables.
            unknown = max(missing, default=0) >= self._model.vocab_size
            if not missing or unknown or not self._make_room(state.kv, room_for, drafts):
                continue
            budget -= len(missing)
            state.kv.extend(room_for)  # also for the drafts to come: no other request may take it
            state.kv.truncate(state.length + len(missing))
            sequences.append(InputSequence(state.kv, state.length, missing, len(missing) - complete))
            state.length += len(missing)
            computed.append((state.kv, ask.tokens))
            if complete:
                ready.append(ask)
        while sequences:
            logits = self._model.forward(sequences).logits
            self.positions += bool(ready)
            while computed:  # not before: a pass may fail
                kv, tokens = computed.pop()
                kv.publish(tokens)
            best, index = logits.float().max(-1)
            likely = (best - logits.float().logsumexp(-1)).exp().nan_to_num()
            found = torch.stack([index.double(), likely.double()], -1).tolist()  # one wait for both
            for ask, (token, chance) in zip(ready, found, strict=True):
                before = chances[ask.request_id]
                before.append(chance * (before[-1] if before else 1.0))
                drafts[ask.request_id].append(int(token))
            ready = [ask for ask in ready if len(drafts[ask.request_id]) < ask.draft_len]
            sequences = [self._feed(ask, drafts[ask.request_id][-1]) for ask in ready]
        self.chances = list(chances.values())
        return list(drafts.values())

    def rehearse(self, batch: int, draft_len: int) -> None:
        for _ in range(draft_len):
            caches = []
            for kv in (KV(self._pool) for _ in range(min(batch, self._pool.free_blocks))):
                kv.extend(1)
                caches.append(kv)
            self._model.forward([InputSequence(kv, 0, [0], 0) for kv in caches])
            for kv in caches:
                kv.release()

    def forget(self, request_id: str) -> None:
        state = self._states.pop(request_id, None)
        if state:
            state.kv.release()

    def _reuse(self, ask: Ask) -> None:
        """Keep the KV that agrees with the tokens: that of accepted drafts and of a beginning shared with others."""
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

    def _make_room(self, kv: KV, tokens: int, in_use: Container[str]) -> bool:
        """Whether `kv` has room for so many tokens, if need be after requests not `in_use` have lost their KV."""
        while kv.room < tokens:
            idle = next((name for name in self._states if name not in in_use and self._states[name].kv.blocks), None)
            if idle is None:
                return False
            self.forget(idle)
        return True

    def _feed(self, ask: Ask, token: int) -> InputSequence:
        """The input for the draft after `token`, which is a draft itself."""
        state = self._states[ask.request_id]
        start = state.kv.length
        state.kv.extend(1)
        state.drafts.append(token)
        return InputSequence(state.kv, start, [token], 0)
