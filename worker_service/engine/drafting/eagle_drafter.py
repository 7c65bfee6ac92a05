"""The drafter that is an EAGLE-3 head on the target, with KV of its own. The head itself is eagle.py's.

Entry i of a request's KV is made of what the target knew at position i and of the token after it. Entries of verified
tokens come from the target's own states, which `read` collects; those of drafts come from the head's, and are dropped
after each proposal.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import embedding

from worker_service.engine.attention import QueryRange, paged_attention
from worker_service.engine.drafting.drafter import USUAL, Ask, Drafter, Price, Seen
from worker_service.engine.drafting.eagle import EagleHead
from worker_service.engine.drafting.eagle_layer import EagleLayer, NativeEagleLayer, TorchEagleLayer, prepared
from worker_service.engine.kv import KV, BlockPool
from worker_service.engine.shape import AttentionShape

_MOST_UNREAD = 1024  # rows of states that wait for somebody who asks for drafts, of all requests together


@dataclass(slots=True)
class _State:
    """Of one request: KV of `length` entries; before them the text has `skipped` positions that have none."""

    kv: KV
    length: int = 0
    skipped: int = 0
    hidden: torch.Tensor | None = None  # [hidden]: what the head knew at the last of them
    unread: list[Seen] = field(default_factory=list)  # one after the other

    @property
    def end(self) -> int:
        """The position of the next entry."""
        return self.skipped + self.length

    @property
    def read_to(self) -> int:
        """The position after all that was read."""
        return self.unread[-1].start + len(self.unread[-1].states) if self.unread else self.end


class EagleDrafter(Drafter):
    """Drafts greedily, one token at a time for the whole batch, for as long as another one may pay.

    What the target reads is computed once drafts are asked for. A request may lose its KV here, or find the target
    spared from reading its beginning by a cache: it goes on from what the target reads next. Of the text before, the
    head then sees the blocks that it has cached itself, as kv.py shares them, and no more.
    """

    def __init__(
        self,
        head: EagleHead,
        layers: Sequence[int],
        embeddings: torch.Tensor,
        *,
        context_tokens: int,
        blocks: int,
        block_tokens: int,
        price: Price = USUAL,
    ) -> None:
        """`layers`: whose inputs the head reads. `embeddings`: the target's [vocabulary, hidden]; the drafter works on
        a copy of the head in their dtype, on their device. `blocks` of `block_tokens` are the KV memory. `price`: see
        HeadDrafter. Raises ValueError where head and target do not fit.
        """
        config, dtype, device = head.config.layer, embeddings.dtype, embeddings.device
        if head.fc.in_features != len(layers) * head.config.target_hidden_size:
            raise ValueError(f"it reads {head.fc.in_features} numbers, not those of {len(layers)} layers")
        if head.embed_tokens is not None:
            embeddings = head.embed_tokens.weight.to(device, dtype)
        if embeddings.shape[1] != config.hidden_size:
            raise ValueError(f"it has no embeddings of its own, and the target's are not of size {config.hidden_size}")
        self.layers = tuple(layers)
        self._head = prepared(head, device, dtype)
        self._embeddings, self._ids = embeddings, head.draft_ids.to(device)
        shape = AttentionShape(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        attention = paged_attention([shape], context_tokens, blocks, block_tokens, device, dtype)
        self._layer: EagleLayer = (
            NativeEagleLayer(self._head, attention)
            if NativeEagleLayer.supports(self._head, attention)
            else TorchEagleLayer(self._head, attention, dtype)
        )
        self._pool = BlockPool(blocks, block_tokens)
        self._price = price
        self._states: dict[str, _State] = {}  # the one used last is last
        self._unread = 0

    def read(self, seen: Sequence[Seen]) -> None:
        for each in seen:
            state = self._states.get(each.ask.request_id)
            if state is None or state.read_to != each.start:
                self.forget(each.ask.request_id)
                state = self._states[each.ask.request_id] = self._begin(each)
            # A copy: the tensor behind these rows is that of the whole step.
            state.unread.append(each._replace(states=each.states.clone()))
            self._unread += len(each.states)
        if self._unread > _MOST_UNREAD:
            self._catch_up([name for name, state in self._states.items() if state.unread])

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        names = [ask.request_id for ask in asks]
        for name in names:
            if name in self._states:
                self._states[name] = self._states.pop(name)
        self._catch_up(names)
        drafts: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
        ready = [(ask, state) for ask in asks if (state := self._states.get(ask.request_id)) and _complete(state, ask)]
        hidden = [state.hidden for _, state in ready if state.hidden is not None]
        self._chain(ready, torch.stack(hidden) if hidden else self._embeddings[:0], drafts)
        for _, state in ready:
            state.kv.truncate(state.length)
        self.chances = [[chance for _, chance in own] for own in drafts.values()]
        return [[token for token, _ in own] for own in drafts.values()]

    def _chain(
        self, ready: list[tuple[Ask, _State]], hidden: torch.Tensor, drafts: dict[str, list[tuple[int, float]]]
    ) -> None:
        """Append to `drafts`, by request, those that follow from `hidden` [requests, hidden], and their chances."""
        chances, self.positions = [1.0] * len(ready), 0
        while ready:
            self.positions += 1
            logits = self._head.logits(hidden).float()
            best, index = logits.max(-1)
            steps, tokens = (best - logits.logsumexp(-1)).exp().tolist(), self._ids[index].tolist()
            chances = [chance * step for chance, step in zip(chances, steps, strict=True)]
            on = []
            for i, (ask, state) in enumerate(ready):
                if chances[i] >= self._price.least:
                    drafts[ask.request_id].append((tokens[i], chances[i]))
                    if len(drafts[ask.request_id]) < ask.draft_len and self._reserve(state, 1, drafts):
                        on.append(i)
            if not self._price.goes_on(chances):
                return
            ready, chances = [ready[i] for i in on], [chances[i] for i in on]
            hidden = self._enter([(state, 1) for _, state in ready], hidden[on], [tokens[i] for i in on])

    def price(self, price: Price) -> None:
        self._price = price

    def rehearse(self, batch: int, draft_len: int) -> None:
        states = [_State(KV(self._pool)) for _ in range(batch)]
        states = [state for state in states if self._reserve(state, draft_len, ())]
        hidden = self._embeddings.new_ones(len(states), self._embeddings.shape[1])
        for _ in range(draft_len if states else 0):
            self._head.logits(hidden).max(-1)
            hidden = self._enter([(state, 1) for state in states], hidden, [0] * len(states))
        for state in states:
            state.kv.release()

    def forget(self, request_id: str) -> None:
        if state := self._states.pop(request_id, None):
            self._unread -= sum(len(each.states) for each in state.unread)
            state.kv.release()

    def _begin(self, seen: Seen) -> _State:
        """With the entries of the beginning of the same text that there are. Entries know of the text's first token
        without having it, so it is told as salt."""
        tokens = seen.ask.tokens
        kv = KV(self._pool, f"{tokens[0]} {seen.ask.salt}")
        kv.adopt([*tokens[1 : seen.start + 1], 0])  # all of it may be shared: nothing has to be left to compute
        return _State(kv, kv.length, seen.start - kv.length)

    def _catch_up(self, names: Sequence[str]) -> None:
        """Make entries of all that these requests have not read. Where there is no room they are forgotten."""
        behind: list[tuple[_State, int]] = []
        states: list[torch.Tensor] = []
        tokens: list[int] = []
        for name in names:
            if (state := self._states.get(name)) is None or not state.unread:
                continue
            count = state.read_to - state.end
            if not self._reserve(state, count, names):
                self.forget(name)
                continue
            behind.append((state, count))
            states.extend(each.states for each in state.unread)
            tokens.extend(state.unread[0].ask.tokens[state.end + 1 : state.read_to + 1])
        if not behind:
            return
        hidden = self._enter(behind, self._head.fc(torch.cat(states)), tokens)
        for (state, count), own in zip(behind, hidden, strict=True):
            state.hidden, state.length = own, state.kv.length
            self._unread -= count
            block = self._pool.block_tokens
            if not state.skipped and state.length // block > (state.length - count) // block:
                state.kv.publish(state.unread[0].ask.tokens[1:])
            state.unread.clear()

    def _enter(self, rows: Sequence[tuple[_State, int]], hidden: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """Add so many entries to each state, of `hidden` and `tokens` one after the other. Room for them is reserved.
        Returns what the head knows [states, hidden] at the last one of each."""
        if not rows:
            return hidden
        ranges: list[QueryRange] = []
        positions: list[int] = []
        for state, count in rows:
            start = state.kv.length
            state.kv.extend(count)
            ranges.append(QueryRange(len(positions), count, start, state.kv.table))
            positions.extend(range(state.skipped + start, state.skipped + start + count))
        ids, places, last = self._layer.begin(ranges, (tokens, positions, [r.begin + r.n - 1 for r in ranges]))
        return self._layer(hidden, embedding(ids, self._embeddings), places)[last]

    def _reserve(self, state: _State, count: int, in_use: Container[str]) -> bool:
        """Whether there is room for so many more entries, if need be after requests not `in_use` have lost theirs."""
        while state.kv.room < count:
            idle = next((name for name in self._states if name not in in_use and self._states[name].kv.blocks), None)
            if idle is None:
                return False
            self.forget(idle)
        length = state.kv.length
        state.kv.extend(count)  # no other request may take it
        state.kv.truncate(length)
        return True


def _complete(state: _State, ask: Ask) -> bool:
    """Whether it has an entry for all of the text but its last token, of which the first draft is made."""
    return state.hidden is not None and not state.unread and state.end == len(ask.tokens) - 1
