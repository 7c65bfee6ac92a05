"""A causal LM's forward pass over packed tokens of many requests. No sampling, no scheduling.

All tokens of a step, those of decoding as well as parts of prompts, are one packed text of T tokens. Only attention
looks at the requests one by one, each over its own KV. So there is no padding, and each request may bring another
number of tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from worker_service.engine.attention import PagedAttention, QueryRange, TorchAttention, paged_attention
from worker_service.engine.clock import Clock
from worker_service.engine.cut import NoHead, layer_list, own_layers
from worker_service.engine.decoder import NativeDecoder
from worker_service.engine.graphs import Graphs, PaddedRound, Results, Size
from worker_service.engine.kv import KV, BlockPool, Fork
from worker_service.engine.output_head import float32_head
from worker_service.engine.packed import PackedLinear
from worker_service.engine.probe import LayerAsks, probe
from worker_service.engine.shape import attention_shapes, text_config


@dataclass(frozen=True, slots=True)
class InputSequence:
    """Consecutive tokens of one request, from position `start` of its text on. `kv` already has place for them; a fork
    of it comes after the tokens that it follows."""

    kv: KV | Fork
    start: int
    tokens: Sequence[int]
    logits_from: int  # logits are computed for tokens[logits_from:]


class Passed(NamedTuple):
    """What a forward pass of T tokens gives, for those n of them whose logits are wanted and for all."""

    logits: torch.Tensor  # float32 [n, vocabulary]
    hidden: torch.Tensor  # [n, hidden size], in the model's dtype: what the output head made them from
    states: torch.Tensor | None  # [T, exposed layers * hidden size], if any are exposed: what enters these layers
    clock: Clock | None = None  # of a GPU, which may still be at work


class Target:
    """A causal LM of the transformers library whose attention supports the attention interface registry, or a Llama of
    llama.py that decoder.py takes.

    What it computes is the module's own forward pass; models that decoder.py knows go through that.
    """

    def __init__(self, model: Any, shares: int = 1) -> None:
        """`shares`: over how many devices the heads of the model's attention are split."""
        head = model.get_output_embeddings()
        if isinstance(head, (NoHead, PackedLinear)):  # another stage has it, or it is of few bits
            pass
        elif PackedLinear.supports(head):
            model.set_output_embeddings(PackedLinear(head))
        elif model.dtype != torch.float32:
            model.set_output_embeddings(float32_head(head))
        self._model = model
        self._attention: PagedAttention | None = None
        self._decoder: NativeDecoder | None = None
        self._graphs: Graphs | None = None
        self._given: list[torch.Tensor] = []  # of this pass, by layers that are exposed
        self._shares = shares
        self._saved: dict[str, list[int]] = {}  # copies of KV: blocks in the host's memory
        self.device, self.dtype = torch.device(model.device), model.dtype
        self.vocab_size = int(text_config(model.config).vocab_size)

    def new_pool(self, blocks: int, block_tokens: int, attention: str = "auto") -> BlockPool:
        """Memory for the KV of all its requests. To be called once, before anything is computed. `attention`: the kind
        of paged_attention.

        Raises ValueError or NotImplementedError where attention over blocks is not what the model asks for.
        """
        config = self._model.config
        shapes, longest = attention_shapes(config, self._shares), text_config(config).max_position_embeddings
        asked, own = probe(self._model), own_layers(self._model)
        shapes = shapes[own.start : own.stop]
        for number, shape in zip(own, shapes, strict=True):
            if number not in asked or asked[number].shape != shape:
                found = asked[number].shape if number in asked else "no attention"
                raise ValueError(f"its layer {number} has {found}, where its configuration says {shape}")
        self._attention = paged_attention(shapes, longest, blocks, block_tokens, self.device, self.dtype, attention)
        self._attention.first, self._attention.asked = own.start, asked
        # The native decoder computes all layers in one call; shares are summed up after each half of a layer.
        if self._shares == 1 and NativeDecoder.supports(self._model, self._attention):
            self._decoder = NativeDecoder(self._model, self._attention)
        else:
            self._attention.take_over(self._model)
        if attention == "graphs":
            assert isinstance(self._attention, TorchAttention)
            clear = self._attention.clear
            self._graphs = Graphs(self._padded, clear, block_tokens, spare=blocks, device=self.device)
        return BlockPool(blocks, block_tokens)

    def expose(self, layers: Sequence[int]) -> None:
        """Have every pass tell the states that enter these layers of the model, all of them ascending; the number of
        layers: those that leave the last one. To be called once, after `new_pool`. Without it nothing is kept.

        Raises ValueError where the model has no such layers.
        """
        count = text_config(self._model.config).num_hidden_layers
        if list(layers) != sorted(set(layers)) or not all(0 <= layer <= count for layer in layers):
            raise ValueError(f"layers {list(layers)} are not in ascending order among its {count}")
        if self._decoder is not None:
            self._decoder.expose(layers)
        else:
            modules = [self._model.get_input_embeddings(), *layer_list(self._model)]
            for layer in layers:
                modules[layer].register_forward_hook(self._keep_output)

    def _keep_output(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self._given.append(output[0] if isinstance(output, torch.Tensor) else output[0][0])

    def forward(self, sequences: Sequence[InputSequence]) -> Passed:
        """Compute the tokens of all sequences, filling their KV."""
        input_ids: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        ranges: list[QueryRange] = []
        for sequence in sequences:
            begin, n = len(input_ids), len(sequence.tokens)
            wanted.extend(range(begin + sequence.logits_from, begin + n))
            input_ids.extend(sequence.tokens)
            positions.extend(range(sequence.start, sequence.start + n))
            source = sequence.kv.source if isinstance(sequence.kv, Fork) else -1
            ranges.append(QueryRange(begin, n, sequence.start, sequence.kv.table, source))
        return self._compute(input_ids, positions, wanted, ranges)

    # What follows knows no requests: where a model is shared, each process does the same (parallel.py).

    def _compute(
        self, input_ids: Sequence[int], positions: Sequence[int], wanted: Sequence[int], ranges: Sequence[QueryRange]
    ) -> Passed:
        clock = Clock(self.device) if self.device.type == "cuda" else None
        results = self._graphs.run(input_ids, wanted, ranges) if self._graphs else None
        if results is None:
            results = self._results(*self._memory.begin(ranges, (input_ids, positions, wanted)))
        if clock:
            clock.stop()
        return Passed(*results, clock)

    def _padded(self, given: PaddedRound, size: Size) -> Results:
        """What a graph records."""
        assert isinstance(self._memory, TorchAttention)
        every = self._memory.begin_padded(given.blocks, given.offsets, given.positions, given.tables, size.requests)
        return self._results(given.ids, given.positions, every)

    def _results(self, input_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> Results:
        self._given.clear()
        logits, hidden = self._pass(input_ids, positions, wanted)
        return logits.float(), hidden, torch.cat(self._given, -1) if self._given else None

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _pass(
        self, input_ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward`, of `input_ids` [T] at `positions` [T]. `wanted` [n]: indices of the tokens that need logits.
        Logits and hidden states [n, ...]."""
        head = self._model.get_output_embeddings()
        if self._decoder is not None:
            every, self._given = self._decoder(input_ids, positions)
            hidden = every[wanted]
            return head(hidden[None])[0], hidden
        # The head is left to the model, for some scale its logits afterwards.
        with given_rows(head, wanted) as given:
            output = self._model(input_ids=input_ids[None], position_ids=positions[None], use_cache=False)
        return output.logits[0], given[0][0]

    def save(self, name: str, table: Sequence[int]) -> None:
        """Keep a copy of these blocks in the host's memory, under this name."""
        self._saved[name] = self._memory.save(table)

    def restore(self, name: str, first: int, table: Sequence[int]) -> None:
        """Write the copy's blocks from number `first` on into the blocks of `table`. The copy stays."""
        self._memory.restore(table, self._saved[name], first)

    def discard(self, name: str) -> None:
        """Give up the copy under this name."""
        self._memory.discard(self._saved.pop(name))

    @property
    def forks(self) -> bool:
        """Whether a pass may have forks of a request's KV. Not as a graph, which pads all texts to the longest."""
        return self._graphs is None

    @property
    def asked(self) -> Mapping[int, LayerAsks]:
        """The demands of the model on its attention, by layer."""
        return self._memory.asked

    @property
    def _memory(self) -> PagedAttention:
        if self._attention is None:
            raise RuntimeError("a pool comes first")
        return self._attention


class Sharers(Protocol):
    """The processes that share a model with this one, which leads them."""

    def target(self, model: Any) -> Target:
        """The whole model's target, of this process's share."""


@contextmanager
def given_rows(head: torch.nn.Module, wanted: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Within, an output head of a model computes these of its rows alone. It tells the hidden states [1, n, hidden
    size] that it was given, of each pass."""
    given: list[torch.Tensor] = []

    def select(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        given.append(inputs[0][:, wanted])
        return given[-1], *inputs[1:]

    with head.register_forward_pre_hook(select):
        yield given
