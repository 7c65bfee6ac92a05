"""From embeddings to the last hidden states in native code, for models of the Llama family on a CPU. No sampling.

The native decoder computes what the transformers module computes, with the module's own weights, packed for the
kernels. Between its layers nothing is rounded to bfloat16.
"""

import ctypes
from typing import Any

import torch

from worker_service.engine import native
from worker_service.engine.attention import NativeAttention, PagedAttention
from worker_service.engine.packed import pack

# The layers of these models are all the same: RMS norm, rotary embedding, grouped-query attention, gated SiLU.
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


class NativeDecoder:
    """All layers of a model in one call of kernels/decoder.h."""

    @staticmethod
    def supports(model: Any, attention: PagedAttention) -> bool:
        if type(model).__name__ not in _FAMILY or not isinstance(attention, NativeAttention):
            return False
        config, shape, layers = model.config, attention.shapes[0], model.base_model.layers
        qkv = (shape.heads + 2 * shape.kv_heads) * shape.dim
        products = [part for layer in layers for part in layer.modules() if isinstance(part, torch.nn.Linear)]
        return (
            all(n % native.PANEL == 0 for n in (config.hidden_size, config.intermediate_size, qkv))
            and config.hidden_act == "silu"
            and len(products) == 7 * len(layers)
            and all(type(part) is torch.nn.Linear and part.weight.dtype == attention.dtype for part in products)
            and all(layer.self_attn.o_proj.bias is layer.mlp.down_proj.bias is None for layer in layers)
            and len(set(attention.asked.values())) == 1
        )

    def __init__(self, model: Any, attention: PagedAttention) -> None:
        """The weights of the model's layers move into this decoder: the module cannot be called any more."""
        assert isinstance(attention, NativeAttention)
        base, config, shape, dtype = model.base_model, model.config, attention.shapes[0], attention.dtype
        self._attention, self._embed, self._rotary = attention, base.embed_tokens, base.rotary_emb
        self._kept: list[torch.Tensor] = []  # what the structures below point to
        layers = (_Layer * len(base.layers))()
        window, scale = attention.asked[0].window, base.layers[0].self_attn.scaling
        for layer, module, (keys, values) in zip(layers, base.layers, attention.pointers, strict=True):
            own, mlp = module.self_attn, module.mlp
            qkv = [own.q_proj, own.k_proj, own.v_proj]
            layer.qkv = self._keep(pack(torch.cat([part.weight for part in qkv])))
            if own.q_proj.bias is not None:
                layer.qkv_bias = self._keep(torch.cat([part.bias for part in qkv]).float())
            layer.output = self._keep(pack(own.o_proj.weight))
            layer.gate_up = self._keep(pack(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])))
            layer.down = self._keep(pack(mlp.down_proj.weight))
            layer.attention_norm = self._keep(module.input_layernorm.weight.float())
            layer.mlp_norm = self._keep(module.post_attention_layernorm.weight.float())
            layer.keys, layer.values = keys, values
            module.to("meta")
        self._decoder = _Decoder(
            shape.heads, shape.kv_heads, shape.dim, attention.block_tokens,
            len(layers), config.hidden_size, config.intermediate_size, window,
            scale, config.rms_norm_eps,
            self._keep(base.norm.weight.float()), layers,
        )  # fmt: skip
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        self._kernel = native.function("decode", dtype, pointer, pointer, integer, pointer, integer, *[pointer] * 4)
        self._dtype = dtype

    def _keep(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor.detach().contiguous())
        return self._kept[-1].data_ptr()

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states [T, hidden size] of the tokens `ids` [T] at `positions` [T], as given to the attention."""
        x = self._embed(ids).float()
        cosine, sine = (part[0].contiguous() for part in self._rotary(x, positions[None]))
        hidden = torch.empty(x.shape, dtype=self._dtype)
        self._kernel(
            ctypes.byref(self._decoder), *self._attention.ranges, len(ids),
            cosine.data_ptr(), sine.data_ptr(), x.data_ptr(), hidden.data_ptr(),
        )  # fmt: skip
        return hidden
