"""The sizes of a model's attention, read from its transformers configuration. No tensors live here."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class AttentionShape(NamedTuple):
    """Layers of one model, all alike, and the heads of each. `heads` are those of queries, `dim` is the size of one."""

    layers: int
    heads: int
    kv_heads: int
    dim: int

    @property
    def kv_values_per_token(self) -> int:
        """How many numbers the keys and values of one token are, in all layers."""
        return 2 * self.layers * self.kv_heads * self.dim


def attention_shape(config: Any, shares: int = 1) -> AttentionShape:
    """Of the share of one of `shares` devices that split the model's heads.

    Raises ValueError if its layers differ in their heads, or if those do not divide by `shares`.
    """
    found = {_heads(layer) for layer in layer_configs(config)}
    if len(found) > 1:
        raise ValueError(f"has layers with attention heads of different sizes or numbers: {sorted(found)}")
    ((heads, kv_heads, dim),) = found
    if heads % shares or kv_heads % shares:
        raise ValueError(f"has {heads} heads with {kv_heads} for keys and values, which do not divide by {shares}")
    return AttentionShape(config.num_hidden_layers, heads // shares, kv_heads // shares, dim)


def layer_configs(config: Any) -> Sequence[Any]:
    """The configuration of each layer; only one where all layers have the same."""
    return config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]


def _heads(config: Any) -> tuple[int, int, int]:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads
