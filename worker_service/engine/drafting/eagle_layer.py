"""The layer of an EAGLE-3 head over the entries of several requests: natively on a CPU, with torch elsewhere. Whose
entries they are, and what is drafted, is not known here."""

import copy
import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from worker_service.engine import native
from worker_service.engine.attention import NativeAttention, PagedAttention, QueryRange
from worker_service.engine.decoder import Decoder, Layer, decode_kernel
from worker_service.engine.drafting.eagle import EagleHead
from worker_service.engine.packed import PackedLinear
from worker_service.engine.probe import Options


class EagleLayer(Protocol):
    """Used in pairs: `begin` says which entries of KV the call after it makes."""

    def begin(self, ranges: Sequence[QueryRange], numbers: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """The next call makes the entries `ranges`. `numbers`, any, come back as tensors on the device."""

    def __call__(self, hidden: torch.Tensor, embeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The head's states after n tokens, float32 [n, hidden size]. `hidden` [n, hidden size], `embeds` [n, hidden
        size] and `positions` [n] are as for `EagleHead.forward`."""


class TorchEagleLayer:
    """The module itself, with any attention."""

    def __init__(self, head: EagleHead, attention: PagedAttention, dtype: torch.dtype) -> None:
        """`head` as `prepared`."""
        self._head, self._attention, self._dtype = head, attention, dtype
        self._options = Options(head.config.layer.head_dim**-0.5)
        self.begin = attention.begin

    def __call__(self, hidden: torch.Tensor, embeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self._head(hidden.float(), embeds.float(), positions, self._attend)
        return result

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.to(self._dtype) for x in (query, key, value))
        return self._attention.attend(q, k, v, 0, self._options).float()


class NativeEagleLayer:
    """A decoder of one layer (kernels/decoder.h) that reads the embedding beside each state."""

    @staticmethod
    def supports(head: EagleHead, attention: PagedAttention) -> bool:
        """`head` as `prepared`."""
        config = head.config.layer
        heads = config.num_attention_heads, config.num_key_value_heads
        sizes = config.hidden_size, config.intermediate_size, *(n * config.head_dim for n in heads)
        fits = all(n % native.PANEL == 0 for n in sizes)
        plain = not head.config.norm_before_residual and not head.config.biased
        return fits and plain and isinstance(attention, NativeAttention)

    def __init__(self, head: EagleHead, attention: PagedAttention) -> None:
        assert isinstance(attention, NativeAttention)
        config, shape = head.config.layer, attention.shapes[0]
        layer: Any = head.midlayer
        own, mlp = layer["self_attn"], layer["mlp"]
        self._attention, self._rotary = attention, head._rotary
        self._kept: list[Any] = [head]  # what the structures below point to
        ((keys, values),) = attention.pointers
        self._layer = Layer(
            qkv=tuple(_matrix(own[f"{name}_proj"]) for name in "qkv"),
            output=_matrix(own["o_proj"]),
            gate_up=tuple(_matrix(mlp[name]) for name in ("gate_proj", "up_proj")),
            down=_matrix(mlp["down_proj"]),
            attention_norm=self._norm(layer["hidden_norm"]),
            beside_norm=self._norm(layer["input_layernorm"]),
            mlp_norm=self._norm(layer["post_attention_layernorm"]),
            keys=keys,
            values=values,
        )
        self._decoder = Decoder(
            *(shape.heads, shape.kv_heads, shape.dim, attention.block_tokens),
            *(1, config.hidden_size, config.intermediate_size, 0),
            *(config.head_dim**-0.5, config.rms_norm_eps),
            None,
            ctypes.pointer(self._layer),
        )
        self._kernel = decode_kernel(attention.dtype)
        self.begin = attention.begin

    def __call__(self, hidden: torch.Tensor, embeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x, beside = hidden.to(torch.float32, copy=True), embeds.float().contiguous()
        cosine, sine = (part[0].contiguous() for part in self._rotary(x, positions[None]))
        pointers = [tensor.data_ptr() for tensor in (cosine, sine, x)]
        own = ctypes.byref(self._decoder)
        self._kernel(own, *self._attention.ranges, len(x), *pointers, None, beside.data_ptr())
        return x

    def _norm(self, norm: Any) -> int:
        self._kept.append(norm.weight.float().contiguous())
        return int(self._kept[-1].data_ptr())


def _matrix(part: Any) -> Any:
    assert isinstance(part, PackedLinear)
    return part.packed.matrix


def prepared(head: EagleHead, device: torch.device, dtype: torch.dtype) -> EagleHead:
    """A copy that multiplies in `dtype`, with packed weights where there are kernels for them, and adds in float32."""
    head = copy.deepcopy(head).requires_grad_(False)
    head.embed_tokens = None
    head.to(device)
    for module in list(head.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear):
                narrow = child.to(dtype)
                setattr(module, name, PackedLinear(narrow) if PackedLinear.supports(narrow) else _Narrow(narrow))
    return head


class _Narrow(torch.nn.Module):
    """A product in the dtype of its weights, of float32 and to float32."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self._linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] to [..., outputs]."""
        result: torch.Tensor = self._linear(x.to(self._linear.weight.dtype)).float()
        return result
