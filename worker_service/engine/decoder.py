"""From embeddings to the last hidden states in native code, for models of the Llama family on a CPU. No sampling.

The native decoder computes what the transformers module computes, with the module's own weights, packed for the
kernels. Between its layers nothing is rounded to bfloat16.
"""

import ctypes
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Any

import torch

from worker_service.engine import native
from worker_service.engine.attention import NativeAttention, PagedAttention
from worker_service.engine.cut import own_layers
from worker_service.engine.llama import Llama, LlamaConfig
from worker_service.engine.packed import Matrix, Packed, PackedLinear, gather
from worker_service.engine.shape import attention_shapes

# The layers of these models are all the same: RMS norm, rotary embedding, grouped-query attention, gated SiLU. Qwen 3
# normalises the heads of queries and keys, too.
_FAMILY = ("Llama", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class Layer(ctypes.Structure):
    _fields_ = [
        *(("qkv", Matrix * 3), ("output", Matrix), ("gate_up", Matrix * 2), ("down", Matrix)),
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, ctypes.c_void_p) for name in ("qkv_bias", "beside_norm")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
    ]


_LINEAR = (torch.nn.Linear, PackedLinear)


def _dtype(part: torch.nn.Linear | PackedLinear) -> torch.dtype:
    """Of the activations that it takes."""
    return part.dtype if isinstance(part, PackedLinear) else part.weight.dtype


class Decoder(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("heads", "kv_heads", "dim", "block_tokens")),
        *((name, ctypes.c_int32) for name in ("layers", "hidden", "inner", "window")),
        *((name, ctypes.c_float) for name in ("scale", "epsilon")),
        ("norm", ctypes.c_void_p),
        ("layer", ctypes.POINTER(Layer)),
    ]


def decode_kernel(dtype: torch.dtype) -> Callable[..., None]:
    """`decode` of kernels/kernels.cpp: a pass through the layers of a `Decoder` with weights of this type."""
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    return native.function("decode", dtype, pointer, pointer, integer, pointer, integer, *[pointer] * 5)


class NativeDecoder:
    """All layers of a model in one call of kernels/decoder.h."""

    @staticmethod
    def takes(config: Any, block_tokens: int, dtype: torch.dtype) -> bool:
        """Whether it supports a model of this configuration, before there is one: of llama.py, or of transformers,
        where it may turn out that it does not."""
        if not isinstance(config, LlamaConfig) and not set(config.architectures or ()) & set(_FAMILY):
            return False
        if getattr(config, "hidden_act", "silu") != "silu" or len(set(getattr(config, "layer_types", None) or ())) > 1:
            return False
        shapes = attention_shapes(config)
        heads = (n * shape.dim for shape in shapes for n in (shape.heads, shape.kv_heads))
        fits = all(n % native.PANEL == 0 for n in (config.hidden_size, config.intermediate_size, *heads))
        return fits and NativeAttention.supports(shapes, block_tokens, dtype)

    @staticmethod
    def supports(model: Any, attention: PagedAttention) -> bool:
        if type(model).__name__ not in _FAMILY or not isinstance(attention, NativeAttention):
            return False
        config, layers = model.config, _own(model)
        products = [part for layer in layers for part in layer.modules() if isinstance(part, _LINEAR)]
        return (
            all(n % native.PANEL == 0 for n in (config.hidden_size, config.intermediate_size))
            and config.hidden_act == "silu"
            and len(products) == 7 * len(layers)
            and all(type(part) in _LINEAR and part.out_features % native.PANEL == 0 for part in products)
            and (isinstance(model, Llama) or all(_dtype(part) == attention.dtype for part in products))
            and all(layer.self_attn.o_proj.bias is layer.mlp.down_proj.bias is None for layer in layers)
            and len(set(attention.asked.values())) == 1
        )

    def __init__(self, model: Any, attention: PagedAttention) -> None:
        """The weights of the model's layers move into this decoder: the module cannot be called any more."""
        assert isinstance(attention, NativeAttention)
        base, config, shape, dtype = model.base_model, model.config, attention.shapes[0], attention.dtype
        self._attention, self._embed, self._rotary = attention, base.embed_tokens, base.rotary_emb
        # What the structures below point to: norms and biases; and the products of each layer.
        self._kept: list[torch.Tensor] = []
        self._products: list[list[Packed]] = []
        modules = _own(model)
        layers = (Layer * len(modules))()
        window, scale = attention.asked[attention.first].window, modules[0].self_attn.scaling
        for layer, module, (keys, values) in zip(layers, modules, attention.pointers, strict=True):
            own, mlp = module.self_attn, module.mlp
            qkv = [own.q_proj, own.k_proj, own.v_proj]
            products = *qkv, own.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj
            self._products.append([self._packed(part) for part in products])
            if own.q_proj.bias is not None:
                layer.qkv_bias = self._keep(torch.cat([part.bias for part in qkv]).float())
            layer.attention_norm = self._keep(module.input_layernorm.weight.float())
            layer.mlp_norm = self._keep(module.post_attention_layernorm.weight.float())
            if hasattr(own, "q_norm"):
                layer.query_norm, layer.key_norm = (self._keep(x.weight.float()) for x in (own.q_norm, own.k_norm))
            layer.keys, layer.values = keys, values
            module.to("meta")
        gather([*chain.from_iterable(self._products)])
        for layer, parts in zip(layers, self._products, strict=True):
            *qkv, layer.output, gate, up, layer.down = (part.matrix for part in parts)
            layer.qkv[:], layer.gate_up[:] = qkv, [gate, up]
        self._layers, self._norm = layers, self._keep(base.norm.weight.float())
        self._shape = shape.heads, shape.kv_heads, shape.dim, attention.block_tokens
        self._sizes = config.hidden_size, config.intermediate_size, window
        self._numbers = scale, config.rms_norm_eps
        self.expose(())
        self._kernel = decode_kernel(dtype)
        self._dtype = dtype

    def _keep(self, tensor: torch.Tensor) -> int:
        kept = tensor.detach().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()

    def _packed(self, part: torch.nn.Linear | PackedLinear) -> Packed:
        return part.packed if isinstance(part, PackedLinear) else Packed(part.weight.to(self._attention.dtype))

    def expose(self, layers: Sequence[int]) -> None:
        """From now on tell the states that enter these layers, in ascending order; their number: those that leave the
        last one. The kernel is called for the layers up to each of them in turn."""
        ends = [0, *layers, len(self._layers)]
        norms = [None] * len(layers) + [self._norm]
        self._parts = [self._part(*ends_, norm) for ends_, norm in zip(pairwise(ends), norms, strict=True)]

    def _part(self, first: int, end: int, norm: int | None) -> Decoder:
        own = ctypes.pointer(self._layers[first]) if first < end else None
        return Decoder(*self._shape, end - first, *self._sizes, *self._numbers, norm, own)

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Hidden states [T, hidden size] of the tokens `ids` [T] at `positions` [T], as given to the attention, and
        those between layers that were asked for."""
        return self.through(self.embed(ids), positions)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """What goes into the first layer, float32 [T, hidden size]."""
        x: torch.Tensor = self._embed(ids).float()
        return x

    def through(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """As a call. `x`, what goes into this model's first layer, is overwritten with what comes out of its last."""
        cosine, sine = (part[0].contiguous() for part in self._rotary(x, positions[None]))
        states: list[torch.Tensor] = []
        for number, part in enumerate(self._parts):
            if number:
                states.append(x.to(self._dtype, copy=True))
            hidden = self._run(part, x, cosine.data_ptr(), sine.data_ptr())
        return hidden, states

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states of what comes out of the last layer, float32 [n, hidden size]."""
        return self._run(self._part(0, 0, self._norm), x, None, None)

    def _run(self, part: Decoder, x: torch.Tensor, cosine: int | None, sine: int | None) -> torch.Tensor:
        hidden = torch.empty(x.shape, dtype=self._dtype)
        pointers = cosine, sine, x.data_ptr(), hidden.data_ptr()
        self._kernel(ctypes.byref(part), *self._attention.ranges, len(x), *pointers, None)
        return hidden


def _own(model: Any) -> list[Any]:
    """The layers that this process has."""
    own = own_layers(model)
    return list(model.base_model.layers)[own.start : own.stop]
