"""The plain model of the Llama family as torch modules: what it computes by itself, for the self-check, and the weights
that decoder.py packs. It stands in for the class of transformers, whose import is a third of what a worker's start
costs. Its files light_models.py reads; which models are plain, is said there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "max_position_embeddings")  # fmt: skip
_ROPE = {"rope_theta", "rope_type"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """By the names of transformers, as shape.py reads them. Attention is causal, without windows, biases or scaling."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    eos_token_id: int | list[int] | None = None
    hidden_act: str = "silu"

    def get_text_config(self) -> Self:
        return self


def plain_config(said: Mapping[str, Any]) -> LlamaConfig | None:
    """The configuration in the fields of a config.json, by the rules of transformers. None: a field is missing or is no
    number, or positions are scaled."""
    rope = said.get("rope_parameters") or {"rope_theta": said.get("rope_theta"), "rope_type": "default"}
    heads = said.get("num_attention_heads")
    if not isinstance(rope, dict) or set(rope) != _ROPE or rope["rope_type"] != "default":
        return None
    ints: dict[str, Any] = {name: said.get(name) for name in SIZES}
    ints["num_key_value_heads"] = kv_heads = said.get("num_key_value_heads") or heads
    numbers: dict[str, Any] = {"rms_norm_eps": said.get("rms_norm_eps"), "rope_theta": rope["rope_theta"]}
    if not all(type(each) is int and each > 0 for each in ints.values()) or ints["num_attention_heads"] % kv_heads:
        return None
    dim = said.get("head_dim") or ints["hidden_size"] // ints["num_attention_heads"]
    if type(dim) is not int or not all(type(each) in (int, float) and each > 0 for each in (dim, *numbers.values())):
        return None
    tied, eos = said.get("tie_word_embeddings", False), said.get("eos_token_id", 2)  # its default in transformers
    if type(tied) is not bool:
        return None
    return LlamaConfig(**ints, **numbers, head_dim=dim, tie_word_embeddings=tied, eos_token_id=eos)


class Llama(torch.nn.Module):
    """A causal LM with the parts, and the names of weights, that a LlamaForCausalLM of transformers has. New, its
    weights are on the device meta: `load_state_dict(..., assign=True)` brings them.

    `matrices`, the names of its layers' large weights, may be of any type, such as their file has: the decoder packs
    them in the model's own, one after the other, so that they are never in memory twice."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Base(config)
        self.lm_head: torch.nn.Module = _linear(config.hidden_size, config.vocab_size)
        self.matrices = {name for name in self.state_dict() if name.endswith("_proj.weight")}

    @property
    def base_model(self) -> "_Base":
        return self.model

    @property
    def device(self) -> torch.device:
        return self.model.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head

    def set_output_embeddings(self, head: torch.nn.Module) -> None:
        self.lm_head = head

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> SimpleNamespace:
        """`logits` [1, T, vocabulary] of `input_ids` [1, T], a text from its first token on."""
        return SimpleNamespace(logits=self.lm_head(self.model(input_ids).to(self.dtype)))


class _Base(torch.nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        nowhere = torch.empty(config.vocab_size, config.hidden_size, device="meta")
        # Nothing is drawn, which would import torch._dynamo.
        self.embed_tokens: torch.nn.Module = torch.nn.Embedding.from_pretrained(nowhere)  # type: ignore[no-untyped-call]
        self.layers = torch.nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = _Norm(config)
        self.rotary_emb = Rotary(config)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The last hidden states [1, T, hidden size], in the type of the layers' weights."""
        first: Any = self.layers[0]
        x = self.embed_tokens(input_ids).to(first.self_attn.q_proj.weight.dtype)
        turns = self.rotary_emb(x, torch.arange(x.shape[1], device=x.device)[None])
        for layer in self.layers:
            x = layer(x, *turns)
        normed: torch.Tensor = self.norm(x)
        return normed


class Rotary(torch.nn.Module):
    """Position embeddings: by how much each pair of a head's numbers is turned."""

    _frequencies: torch.Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        even = torch.arange(0, config.head_dim, 2, device="cpu").float()
        self.register_buffer("_frequencies", 1.0 / config.rope_theta ** (even / config.head_dim), persistent=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [1, T, dim], in the type of `x`, of `positions` [1, T]."""
        angles = positions[..., None].float() * self._frequencies
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class _Layer(torch.nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = _Norm(config), _Norm(config)
        self.self_attn, self.mlp = _Attention(config), _Mlp(config)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """Hidden states [1, T, hidden size] to those of the next layer."""
        x = x + self.self_attn(self.input_layernorm(x), cosine, sine)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Attention(torch.nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.scaling, self._dim = config.head_dim**-0.5, config.head_dim
        queries, others = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj, self.o_proj = _linear(config.hidden_size, queries), _linear(queries, config.hidden_size)
        self.k_proj, self.v_proj = (_linear(config.hidden_size, others) for _ in range(2))

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part(x).unflatten(-1, (-1, self._dim)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = (turned(each, cosine, sine) for each in (query, key))
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scaling, enable_gqa=True)
        projected: torch.Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected


class _Norm(torch.nn.RMSNorm):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config.hidden_size, config.rms_norm_eps, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


class _Mlp(torch.nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (_linear(config.hidden_size, config.intermediate_size) for _ in range(2))
        self.down_proj = _linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return down


def _linear(inputs: int, outputs: int) -> torch.nn.Module:
    return torch.nn.Linear(inputs, outputs, bias=False, device="meta")


def turned(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """`x` [..., dim] with its position in it: the first half of a head's numbers and the second are pairs."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine
