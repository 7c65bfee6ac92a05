"""A causal LM's forward pass over packed tokens of many requests. No sampling, no scheduling.

All rows of a round, decode rows as well as prefill chunks, are one packed sequence [1, T]. Only attention looks at
requests one by one, each over its own KV; so there is no padding, and each row may have its own length.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear

from worker_service.engine.attention import PagedAttention, Shape, Span, paged_attention
from worker_service.engine.decoder import NativeDecoder, PackedLinear
from worker_service.engine.kv import KV, BlockPool


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one request: its tokens from `start` on. `kv` already has place for them."""

    kv: KV
    start: int
    tokens: Sequence[int]
    logits_from: int  # logits are computed for tokens[logits_from:]


class Target:
    """A causal LM of the transformers library whose attention supports the attention interface registry.

    What it computes is the module's own forward pass; models that decoder.py knows go through that.
    """

    def __init__(self, model: Any, shares: int = 1) -> None:
        """`shares`: over how many devices the heads of the model's attention are split."""
        head = model.get_output_embeddings()
        if PackedLinear.supports(head):
            model.set_output_embeddings(PackedLinear(head))
        elif model.dtype != torch.float32:
            model.set_output_embeddings(_Float32Head(head))
        # What enters the head is kept, and the head left to the model: some scale its logits afterwards.
        model.get_output_embeddings().register_forward_pre_hook(self._keep_hidden)
        self._model = model
        self._attention: PagedAttention | None = None
        self._decoder: NativeDecoder | None = None
        self._shares = shares
        self._saved: dict[str, torch.Tensor] = {}
        self.device, self.dtype = torch.device(model.device), model.dtype
        self.vocab_size = int(model.config.vocab_size)

    def new_pool(self, blocks: int, block_tokens: int) -> BlockPool:
        """Memory for the KV of all its requests; once."""
        config = self._model.config
        heads = config.num_attention_heads
        shape = Shape(
            layers=config.num_hidden_layers,
            heads=heads // self._shares,
            kv_heads=(getattr(config, "num_key_value_heads", None) or heads) // self._shares,
            dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            blocks=blocks,
            block_tokens=block_tokens,
        )
        self._attention = paged_attention(shape, self.device, self.dtype)
        # The native decoder computes all layers in one call; shares are summed up after each half of a layer.
        if self._shares == 1 and NativeDecoder.supports(self._model, self._attention):
            self._decoder = NativeDecoder(self._model, self._attention)
        else:
            self._model.set_attn_implementation(self._attention.name)
        return BlockPool(blocks, block_tokens)

    def save(self, name: str, kv: KV) -> None:
        """Keep a copy in the host's memory, under this name, of the blocks that hold something."""
        self._save(name, kv.table[: kv.used_blocks])

    def restore(self, name: str, kv: KV, first: int = 0) -> None:
        """The blocks of `kv` from number `first` on, as they were saved. The copy stays."""
        self._restore(name, first, kv.table[first : kv.used_blocks])

    def discard(self, name: str) -> None:
        """The copy is needed no more."""
        self._discard(name)

    def forward(self, segments: Sequence[Segment]) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the segments' tokens, filling their KV.

        Returns float32 logits [wanted rows, vocabulary], and the hidden states that the head made them from
        [wanted rows, hidden size] in the model's dtype.
        """
        tokens: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        spans: list[Span] = []
        for segment in segments:
            begin, n = len(tokens), len(segment.tokens)
            wanted.extend(range(begin + segment.logits_from, begin + n))
            tokens.extend(segment.tokens)
            positions.extend(range(segment.start, segment.start + n))
            spans.append(Span(begin, n, segment.start, segment.kv.table))
        return self._compute(tokens, positions, wanted, spans)

    def _compute(
        self, tokens: Sequence[int], positions: Sequence[int], wanted: Sequence[int], spans: Sequence[Span]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._memory.begin(spans)
        logits = self._logits(
            *(torch.tensor(x, dtype=torch.long, device=self.device) for x in (tokens, positions, wanted))
        )
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # so that the caller's clock measures the pass, not its launch
        return logits.float(), self._hidden

    def _save(self, name: str, table: Sequence[int]) -> None:
        self._saved[name] = self._memory.save(table)

    def _restore(self, name: str, first: int, table: Sequence[int]) -> None:
        self._memory.restore(table, self._saved[name][:, :, first : first + len(table)])  # [layers, 2, blocks, ...]

    def _discard(self, name: str) -> None:
        del self._saved[name]

    @property
    def _memory(self) -> PagedAttention:
        if self._attention is None:
            raise RuntimeError("a pool comes first")
        return self._attention

    def _logits(self, tokens: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        if self._decoder is not None:
            result: torch.Tensor = self._model.get_output_embeddings()(self._decoder(tokens, positions)[wanted][None])[
                0
            ]
            return result
        output = self._model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=wanted
        )
        result = output.logits[0]
        return result

    def _keep_hidden(self, head: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._hidden = inputs[0][0]


class _Float32Head(torch.nn.Module):
    """The output head in float32: bfloat16 logits tie where the model does not."""

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(head.weight.detach().float(), requires_grad=False)
        self.bias = None if head.bias is None else copy.deepcopy(head.bias).float()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden.float(), self.weight, self.bias)
