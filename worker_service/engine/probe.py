"""The demands of a model on its attention, by layer: found by one pass over two tokens, without computing attention.

A window may stand in the mask that the model makes, in what it passes to its attention, or in both. The mask decides,
for masks are what the model itself computes with. So masks are asked which tokens they show, up to the longest text.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from worker_service.engine.llama import Llama
from worker_service.engine.shape import AttentionShape, attention_shapes, text_config

_NAME = "laps_sd_probe"
_TOKENS = 2


class LayerAsks(NamedTuple):
    """Of one layer: the heads that it brings, and how many tokens back a token sees, itself included; 0: all."""

    shape: AttentionShape
    window: int


class Options(NamedTuple):
    """How one layer attends. A score s becomes cap * tanh(s / cap) where there is a cap; `sinks` [heads] are scores of
    nothing: they take a part of the weight and bring no value."""

    scale: float
    window: int = 0  # how many tokens back a token sees, itself included; 0: all
    softcap: float = 0.0  # 0: none
    sinks: torch.Tensor | None = None


@torch.inference_mode()
def probe(model: Any) -> dict[int, LayerAsks]:
    """By layer. `model`: a causal LM of the transformers library; its attention function is replaced, by one that
    cannot be used. Raises NotImplementedError, and what a forward pass raises."""
    if isinstance(model, Llama):  # ours: all that it asks for is in its configuration
        return {layer: LayerAsks(shape, 0) for layer, shape in enumerate(attention_shapes(model.config))}
    from transformers import AttentionInterface, AttentionMaskInterface  # takes seconds

    pass_ = _Pass(int(text_config(model.config).max_position_embeddings))
    AttentionInterface.register(_NAME, pass_.attention)
    AttentionMaskInterface.register(_NAME, pass_.mask)
    model.set_attn_implementation(_NAME)
    tokens = torch.arange(_TOKENS, device=model.device)
    # Logits of chosen tokens: for those of the last ones some models cut their masks.
    model(tokens[None], use_cache=False, logits_to_keep=tokens)
    return pass_.layers


class _Pass:
    def __init__(self, longest: int) -> None:
        self._longest = longest
        # By identity of the mask, which is kept alive. None: it is no window.
        self._windows: dict[int, tuple[torch.Tensor, int | None]] = {}
        self.layers: dict[int, LayerAsks] = {}

    def mask(self, *, mask_function: Callable[..., torch.Tensor], device: Any, **_: Any) -> torch.Tensor:
        """In place of a mask: something that layers pass on to `attention`."""
        mask = torch.ones(1, 1, _TOKENS, _TOKENS, dtype=torch.bool, device=device)
        self._windows[id(mask)] = mask, window_of(mask_function, self._longest, torch.device(device))
        return mask

    def attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Notes what it is asked for. Returns zeros, [1, T, heads, value's dim]."""
        layer: int = module.layer_idx  # type: ignore[assignment]
        _, window = self._windows.get(id(attention_mask), (None, None))
        if window is None:
            raise NotImplementedError(f"its layer {layer} masks tokens otherwise than by a window")
        check_options(layer, window, self._longest, options)
        shape = AttentionShape(query.shape[1], key.shape[1], query.shape[3])
        self.layers[layer] = LayerAsks(shape, window)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def check_options(layer: int, window: int, longest: int, options: Mapping[str, Any]) -> None:
    """Raises NotImplementedError where a layer asks its attention for something else than its mask's `window`, or for
    something that attention over blocks cannot do. `longest`: tokens of a text, beyond which a window has no effect."""
    asked = options.get("sliding_window") or 0
    if asked and (asked if asked < longest else 0) != window:
        raise NotImplementedError(
            f"its layer {layer} asks for a window of {asked} tokens, its mask for {window or 'all'}"
        )
    if options.get("position_bias") is not None or options.get("is_causal") is False:
        raise NotImplementedError(f"its layer {layer} asks for more than causal attention")


def window_of(mask_function: Callable[..., torch.Tensor], longest: int, device: torch.device) -> int | None:
    """How many tokens back a token sees in texts of up to `longest` tokens, itself included; 0: all; None: it sees
    other tokens than the last so many.

    `mask_function`: as of transformers, of the indices of text, head, query and key.
    """
    zero, every = torch.tensor(0, device=device), torch.arange(longest, device=device)

    def seen(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return mask_function(zero, zero, query, key).expand(longest)

    first = seen(every, zero)  # by whom the first token is seen
    window = longest if bool(first.all()) else int(first.int().argmin())
    around = {0, 1, 2, longest // 2, longest - 1} | {n * window + i for n in (1, 2) for i in (-1, 0, 1)}
    for at in sorted(at for at in around if 0 <= at < longest):
        if not torch.equal(seen(zero + at, every), (every <= at) & (every > at - window)):
            return None
    return window if window < longest else 0
