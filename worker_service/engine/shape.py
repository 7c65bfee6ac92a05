"""The sizes of a model's attention, and how long its texts may be, read from its transformers configuration. No tensors
live here."""

from collections.abc import Sequence
from typing import Any, NamedTuple


class AttentionShape(NamedTuple):
    """The heads of one layer. `heads` are those of queries, `dim` is the size of one."""

    heads: int
    kv_heads: int
    dim: int

    @property
    def kv_values_per_token(self) -> int:
        """How many numbers the keys and values of one token are."""
        return 2 * self.kv_heads * self.dim


def text_config(config: Any) -> Any:
    """The part that describes the language model, of a model that also sees or hears; else the configuration itself."""
    return config.get_text_config()


def attention_shapes(config: Any, shares: int = 1) -> tuple[AttentionShape, ...]:
    """Of each layer, as the share of one of `shares` devices that split the model's heads.

    Raises ValueError if the heads of a layer do not divide by `shares`.
    """
    config = text_config(config)
    layers = layer_configs(config)
    found = [_shape(layer, shares) for layer in layers]
    return tuple(found * config.num_hidden_layers if len(found) == 1 else found)


def kv_values_per_token(shapes: Sequence[AttentionShape]) -> int:
    """How many numbers the keys and values of one token are, in all layers."""
    return sum(shape.kv_values_per_token for shape in shapes)


def layer_configs(config: Any) -> Sequence[Any]:
    """The configuration of each layer; only one where all layers have the same."""
    return config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]


def longest_text(config: Any) -> int:
    """Up to how many tokens a text's positions have the same frequencies. Some models turn longer texts, from the first
    token on, by others; then KV of a shorter text is of no use."""
    config = text_config(config)
    given = getattr(config, "rope_parameters", None) or {}
    ropes = [given] if "rope_type" in given else [each for each in given.values() if isinstance(each, dict)]
    switches = [
        rope["original_max_position_embeddings"]
        for rope in ropes
        if rope.get("rope_type") == "longrope" and rope.get("original_max_position_embeddings")
    ]
    return int(min([config.max_position_embeddings, *switches]))


def _shape(config: Any, shares: int) -> AttentionShape:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "kv_lora_rank", None):  # what the model compresses is kept as attention gets it
        kv_heads, dim = heads, config.qk_nope_head_dim + config.qk_rope_head_dim
    if heads % shares or kv_heads % shares:
        raise ValueError(f"has {heads} heads with {kv_heads} for keys and values, which do not divide by {shares}")
    return AttentionShape(heads // shares, kv_heads // shares, dim)
