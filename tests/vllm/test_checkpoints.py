"""The table of docs/how-to/vllm.md: the kinds of KV blocks that vLLM makes of widely served checkpoints, whose layers
are those of their configuration's class in transformers. No weights are read."""

from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
import transformers
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, MambaSpec, SlidingWindowSpec

from laps_sd_vllm.plugin import GROUPS as MOST_GROUPS
from laps_sd_vllm.relied_on import GROUPS, _layers
from tests.vllm.play import Way, toy_core

TABLE = [
    ("LlamaConfig", 1, True),
    ("Qwen2Config", 1, True),
    ("Qwen3Config", 1, True),
    ("Qwen3MoeConfig", 1, True),
    ("MistralConfig", 1, True),
    ("Phi3Config", 1, True),
    ("GptOssConfig", 2, True),
    ("Gemma3TextConfig", 7, True),
    ("Llama4TextConfig", 4, False),
]


@pytest.fixture(scope="module")
def vllm_config() -> Any:
    return toy_core(Way(False, False, 0), None).vllm_config


def spec(kind: str, window: int) -> Any:
    shape = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
    if kind == "sliding_attention":
        return SlidingWindowSpec(**shape, sliding_window=window)
    if kind == "chunked_attention":
        return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=8192)
    return FullAttentionSpec(**shape)


@pytest.mark.parametrize(("name", "kinds", "works"), TABLE)
def test_a_checkpoint_is_ordered_or_refused_as_the_table_says(
    vllm_config: Any, name: str, kinds: int, works: bool
) -> None:
    model = getattr(transformers, name)()
    layers = getattr(model, "layer_types", None) or ["full_attention"] * model.num_hidden_layers
    specs = {f"layer{number}": spec(kind, getattr(model, "sliding_window", 0)) for number, kind in enumerate(layers)}
    groups = get_kv_cache_groups(vllm_config, specs)
    assert len(groups) == kinds <= MOST_GROUPS
    assert all(isinstance(each, GROUPS) for group in groups for each in _layers(group.kv_cache_spec)) is works


def test_states_of_linear_attention_are_refused() -> None:
    """Qwen3-Next, Nemotron-H and Jamba have them."""
    assert not issubclass(MambaSpec, GROUPS)
