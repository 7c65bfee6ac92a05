"""The target model's forward pass over packed tokens of many requests. No sampling, no scheduling.

All rows of a round, decode rows as well as prefill chunks, are one packed sequence [1, T]. Only attention looks at
requests one by one, each over its own KV; so there is no padding, and each row may have its own length.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import AttentionInterface

from worker_service.engine.kv import KV, KVPool

_ATTENTION = "laps_sd_ragged"


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one request: its tokens from `start` on. `kv` already has place for them."""

    kv: KV
    start: int
    tokens: Sequence[int]
    logits_from: int  # logits are computed for tokens[logits_from:]


class Target:
    """A causal LM of the transformers library whose attention supports the attention interface registry."""

    def __init__(self, model: Any) -> None:
        AttentionInterface.register(_ATTENTION, _ragged_attention)
        model.set_attn_implementation(_ATTENTION)
        if model.dtype != torch.float32:
            model.set_output_embeddings(_Float32Head(model.get_output_embeddings()))
        # What enters the head is kept, and the head left to the model: some scale its logits afterwards.
        model.get_output_embeddings().register_forward_pre_hook(self._keep_hidden)
        self._model = model
        self.device = torch.device(model.device)
        self.vocab_size = int(model.config.vocab_size)

    def new_pool(self, blocks: int, block_tokens: int) -> KVPool:
        config = self._model.config
        heads = config.num_attention_heads
        return KVPool(
            blocks=blocks,
            block_tokens=block_tokens,
            layers=config.num_hidden_layers,
            heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            device=self.device,
            dtype=self._model.dtype,
        )

    def forward(self, segments: Sequence[Segment]) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the segments' tokens, filling their KV.

        Returns float32 logits [wanted rows, vocabulary], and the hidden states that the head made them from
        [wanted rows, hidden size] in the model's dtype.
        """
        tokens: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        spans: list[_Span] = []
        for segment in segments:
            begin, n = len(tokens), len(segment.tokens)
            end = segment.start + n
            wanted.extend(range(begin + segment.logits_from, begin + n))
            tokens.extend(segment.tokens)
            positions.extend(range(segment.start, end))
            spans.append(_Span(segment.kv, begin, n, segment.start))
        logits = self._model(
            input_ids=torch.tensor([tokens], device=self.device),
            position_ids=torch.tensor([positions], device=self.device),
            use_cache=False,
            logits_to_keep=torch.tensor(wanted, dtype=torch.long, device=self.device),
            spans=spans,
        ).logits[0]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # so that the caller's clock measures the pass, not its launch
        return logits.float(), self._hidden

    def _keep_hidden(self, head: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._hidden = inputs[0][0]


class _Span:
    """Where a segment lies in the packed sequence, with the masks that its layers share."""

    def __init__(self, kv: KV, begin: int, n: int, start: int) -> None:
        self.kv, self.begin, self.n, self.start = kv, begin, n, start
        self._masks: dict[int | None, torch.Tensor] = {}

    def mask(self, window: int | None, query: torch.Tensor) -> torch.Tensor | None:
        """Additive mask [n, start + n]: causal, and no further back than a sliding `window`. None: see everything."""
        total = self.start + self.n
        if self.n == 1 and (window is None or total <= window):
            return None
        if window not in self._masks:
            keys = torch.arange(total, device=query.device)
            own = keys[self.start :, None]
            hidden = keys > own
            if window is not None:
                hidden |= keys <= own - window
            self._masks[window] = torch.zeros(hidden.shape, device=query.device, dtype=query.dtype).masked_fill_(
                hidden, float("-inf")
            )
        return self._masks[window]


def _ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, T, dim]
    key: torch.Tensor,  # [1, kv heads, T, dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # none: this attention has no mask function, it makes its own
    *,
    spans: Sequence[_Span],
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Write each request's new keys and values into its KV, then attend over all it has. Returns [1, T, heads, dim]."""
    if softcap is not None or s_aux is not None:
        raise NotImplementedError(f"attention of {type(module).__name__}: soft caps and sinks are not supported")
    layer: int = module.layer_idx  # type: ignore[assignment]
    query, key, value = query[0], key[0], value[0]
    heads, kv_heads = query.shape[0], key.shape[0]
    outputs = []
    for span in spans:
        begin, n, start = span.begin, span.n, span.start
        keys, values = span.kv.layers[layer]
        keys.narrow(1, start, n).copy_(key.narrow(1, begin, n))
        values.narrow(1, start, n).copy_(value.narrow(1, begin, n))
        outputs.append(
            scaled_dot_product_attention(
                query.narrow(1, begin, n).unsqueeze(0),
                keys.narrow(1, 0, start + n).unsqueeze(0),
                values.narrow(1, 0, start + n).unsqueeze(0),
                attn_mask=span.mask(sliding_window, query),
                scale=scaling,
                enable_gqa=heads != kv_heads,
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None


class _Float32Head(torch.nn.Module):
    """The output head in float32: bfloat16 logits tie where the model does not."""

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(head.weight.detach().float(), requires_grad=False)
        self.bias = None if head.bias is None else copy.deepcopy(head.bias).float()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden.float(), self.weight, self.bias)
