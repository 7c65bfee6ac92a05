"""From embeddings to the last hidden states in native code, for models of the Llama family on a CPU. No sampling.

It computes what the transformers module computes, with the module's own weights, packed for the kernels. Between its
layers nothing is rounded to bfloat16.
"""

import ctypes
from typing import Any

import torch

from worker_service.engine import native
from worker_service.engine.attention import NativeAttention, PagedAttention

_PANEL = 2 * native.LANES
# Their layers are one and the same: RMS norm, rotary embedding, grouped-query attention, gated SiLU.
_FAMILY = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")


class _Layer(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (
            "qkv", "output", "gate_up", "down", "attention_norm", "mlp_norm", "qkv_bias", "keys", "values",
        )
    ]  # fmt: skip


class _Decoder(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("heads", "kv_heads", "dim", "block_tokens")),
        *((name, ctypes.c_int32) for name in ("layers", "hidden", "inner", "window")),
        *((name, ctypes.c_float) for name in ("scale", "epsilon")),
        ("norm", ctypes.c_void_p),
        ("layer", ctypes.POINTER(_Layer)),
    ]


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[n, k] in panels of 32 outputs, as kernels.cpp wants it: [n / 32, k, 32], in bfloat16 [n / 32, k / 2, 32, 2].

    `n` is filled up with zeros.
    """
    n, k = weight.shape
    weight = torch.nn.functional.pad(weight.detach(), (0, 0, 0, -n % _PANEL))
    if weight.dtype == torch.bfloat16:
        return weight.view(-1, _PANEL, k // 2, 2).permute(0, 2, 1, 3).contiguous()
    return weight.view(-1, _PANEL, k).permute(0, 2, 1).contiguous()


class PackedLinear:
    """A product with packed weights, whose sums and results are float32: for bfloat16 logits tie where a model does
    not."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        kernels = native.kernels()
        assert kernels is not None
        self._weight = pack(linear.weight)
        self._bias = None if linear.bias is None else torch.nn.functional.pad(linear.bias.detach().float(), (0, -linear.out_features % _PANEL))
        self._n, self._k, self._dtype = linear.out_features, linear.in_features, linear.weight.dtype
        self._kernel = kernels.linear_float if self._dtype == torch.float32 else kernels.linear_bfloat16
        self._kernel.argtypes = [*[ctypes.c_void_p] * 4, *[ctypes.c_int] * 3]
        self._kernel.restype = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, k] to float32 [rows, n]."""
        x = x.to(self._dtype).contiguous()
        padded = self._n + -self._n % _PANEL
        out = torch.empty((len(x), padded))
        bias = None if self._bias is None else self._bias.data_ptr()
        self._kernel(x.data_ptr(), self._weight.data_ptr(), bias, out.data_ptr(), len(x), padded, self._k)
        return out[:, : self._n]


class NativeDecoder:
    @staticmethod
    def supports(model: Any, attention: PagedAttention) -> bool:
        config = model.config
        return (
            isinstance(attention, NativeAttention)
            and type(model).__name__ in _FAMILY
            and config.hidden_act == "silu"
            and config.hidden_size % _PANEL == 0
            and config.intermediate_size % _PANEL == 0
            and attention.shape.dim % _PANEL == 0 or attention.shape.heads * attention.shape.dim % _PANEL == 0
            and (attention.shape.kv_heads * attention.shape.dim * 2) % _PANEL == 0
            and not getattr(config, "mlp_bias", False)
            and all(layer.self_attn.o_proj.bias is None for layer in model.base_model.layers)
        )

    def __init__(self, model: Any, attention: NativeAttention) -> None:
        kernels = native.kernels()
        assert kernels is not None
        base, config, shape = model.base_model, model.config, attention.shape
        self._attention, self._embed, self._rotary = attention, base.embed_tokens, base.rotary_emb
        self._dtype = attention.dtype
        self._kept: list[torch.Tensor] = []  # what the structures below point to
        layers = (_Layer * shape.layers)()
        for layer, module, (keys, values) in zip(layers, base.layers, attention.layers, strict=True):
            own, mlp = module.self_attn, module.mlp
            layer.qkv = self._pointer(pack(torch.cat([own.q_proj.weight, own.k_proj.weight, own.v_proj.weight])))
            if own.q_proj.bias is not None:
                layer.qkv_bias = self._pointer(
                    torch.cat([own.q_proj.bias, own.k_proj.bias, own.v_proj.bias]).detach().float()
                )
            layer.output = self._pointer(pack(own.o_proj.weight))
            layer.gate_up = self._pointer(pack(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])))
            layer.down = self._pointer(pack(mlp.down_proj.weight))
            layer.attention_norm = self._pointer(module.input_layernorm.weight.detach().float())
            layer.mlp_norm = self._pointer(module.post_attention_layernorm.weight.detach().float())
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
        self._decoder = _Decoder(
            shape.heads, shape.kv_heads, shape.dim, shape.block_tokens,
            shape.layers, config.hidden_size, config.intermediate_size, 0,
            base.layers[0].self_attn.scaling, config.rms_norm_eps,
            self._pointer(base.norm.weight.detach().float()), layers,
        )  # fmt: skip
        self._kernel = kernels.decode_float if self._dtype == torch.float32 else kernels.decode_bfloat16
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        self._kernel.argtypes = [pointer, pointer, integer, pointer, integer, *[pointer] * 4]
        self._kernel.restype = None

    def _pointer(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor.contiguous())
        return self._kept[-1].data_ptr()

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Token ids and positions [T] of the spans that `attention.begin` was told; hidden states [T, hidden]."""
        x = self._embed(ids).float()
        cosine, sine = (part[0].contiguous() for part in self._rotary(x, positions[None]))
        hidden = torch.empty(x.shape, dtype=self._dtype)
        _, spans, count, tables = self._attention.fixed
        self._kernel(
            ctypes.byref(self._decoder), spans, count, tables, len(ids),
            cosine.data_ptr(), sine.data_ptr(), x.data_ptr(), hidden.data_ptr(),
        )  # fmt: skip
        return hidden
