"""The families: a tiny model of each, and whether the engine serves it or refuses it. A table; nothing is run here."""

from typing import Any, NamedTuple

WINDOW = 24
CONTEXT = 320
SWITCH = 96  # from which length on a longrope model turns its texts otherwise

# Of every model, unless its row says otherwise; None takes a size away.
SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
HALF = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
SMALL_HEADS = {"head_dim": 16}
MULTI_HEAD = {"num_key_value_heads": None}
EYES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


LONGROPE = {"original_max_position_embeddings": SWITCH} | rope(
    "longrope",
    original_max_position_embeddings=SWITCH,
    factor=8.0,
    short_factor=[1.0] * 8,
    long_factor=[1.0, 1.3, 1.7, 2.2, 3.0, 4.0, 6.0, 8.0],
)


class Family(NamedTuple):
    kind: str  # model_type of transformers
    changes: dict[str, Any]  # to SIZES
    refused: str = ""  # a regular expression of why; empty: it is served
    windows: tuple[int, ...] = (0, 0)  # of its layers, as a served one's attention is asked for
    eyes: dict[str, Any] | None = None  # it is packaged with vision: the configuration of that
    context: int = CONTEXT  # that it is served with


SLIDING, HALF_SLIDING = (WINDOW, WINDOW), (WINDOW, 0)

FAMILIES: dict[str, Family] = {
    # One stack of like layers.
    "llama": Family("llama", {}),
    "llama, rope linear": Family("llama", rope("linear", factor=2.0)),
    "llama, rope llama3": Family(
        "llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    "llama, rope yarn": Family("llama", rope("yarn", factor=4.0, original_max_position_embeddings=80)),
    "llama, rope dynamic": Family("llama", rope("dynamic", factor=4.0)),
    "llama, heads of 128 with biases": Family("llama", {"head_dim": 128, "attention_bias": True, "mlp_bias": True}),
    "llama, sizes of no power": Family("llama", {"hidden_size": 60, "intermediate_size": 100, "head_dim": 24}),
    "mistral": Family("mistral", {"sliding_window": WINDOW}, windows=SLIDING),
    "ministral3": Family("ministral3", SMALL_HEADS | {"sliding_window": WINDOW}, windows=SLIDING),
    "qwen2": Family("qwen2", {}),
    "qwen2, windows above": Family(
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        windows=(0, WINDOW),
    ),
    "qwen3": Family("qwen3", {"head_dim": 32}),
    "phi 2": Family("phi", {}),
    "phi3": Family("phi3", {"sliding_window": WINDOW}, windows=SLIDING),
    "phi3, longrope": Family("phi3", LONGROPE, refused=f"texts of more than {SWITCH} tokens by other frequencies"),
    "phi3, longrope in short texts": Family("phi3", LONGROPE, context=SWITCH),
    "olmo2": Family("olmo2", {}),
    "olmo3": Family("olmo3", HALF, windows=HALF_SLIDING),
    "granite": Family(
        "granite",
        {
            "embedding_multiplier": 8.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 4.0,
        },
    ),
    "smollm3, a layer without positions": Family("smollm3", {"no_rope_layers": [1, 0], "no_rope_layer_interval": 2}),
    "cohere2": Family("cohere2", HALF, windows=HALF_SLIDING),
    "starcoder2": Family("starcoder2", {"sliding_window": WINDOW}, windows=SLIDING),
    "exaone4": Family("exaone4", HALF, windows=HALF_SLIDING),
    "glm4": Family("glm4", SMALL_HEADS | {"partial_rotary_factor": 0.5}),
    "hunyuan": Family("hunyuan_v1_dense", SMALL_HEADS),
    "ernie 4.5": Family("ernie4_5", {}),
    "seed-oss": Family("seed_oss", SMALL_HEADS),
    "apertus": Family("apertus", {}),
    "nemotron": Family("nemotron", SMALL_HEADS),
    "gpt2": Family("gpt2", MULTI_HEAD | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}),
    "gpt-neox": Family("gpt_neox", MULTI_HEAD),
    "opt": Family("opt", MULTI_HEAD | {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    # Gemma: norms, caps, layers that differ.
    "gemma": Family("gemma", SMALL_HEADS),
    "gemma2": Family(
        "gemma2", SMALL_HEADS | {"sliding_window": WINDOW, "query_pre_attn_scalar": 2}, windows=HALF_SLIDING
    ),
    "gemma3": Family("gemma3_text", SMALL_HEADS | HALF, windows=HALF_SLIDING),
    "gemma3 with vision": Family(
        "gemma3", SMALL_HEADS | HALF, windows=HALF_SLIDING, eyes=EYES | {"model_type": "siglip_vision_model"}
    ),
    "gemma3n": Family("gemma3n_text", SMALL_HEADS | HALF | {"num_kv_shared_layers": 0}, windows=HALF_SLIDING),
    "gemma4": Family(
        "gemma4_text",
        SMALL_HEADS | HALF | {"global_head_dim": 32, "vocab_size_per_layer_input": 160},
        windows=HALF_SLIDING,
    ),
    "gemma4, shared KV": Family(
        "gemma4_text",
        SMALL_HEADS
        | {
            "num_hidden_layers": 4,
            "sliding_window": WINDOW,
            "layer_types": HALF["layer_types"] * 2,
            "num_kv_shared_layers": 2,
            "global_head_dim": 32,
            "vocab_size_per_layer_input": 160,
        },
        windows=HALF_SLIDING * 2,
    ),
    "mistral3 with vision": Family("mistral3", SMALL_HEADS, eyes=EYES | {"model_type": "pixtral"}),
    # Experts.
    "mixtral": Family("mixtral", EXPERTS),
    "qwen2-moe": Family("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 32}),
    "qwen3-moe": Family("qwen3_moe", EXPERTS | {"head_dim": 32}),
    "granite-moe": Family("granitemoe", EXPERTS),
    "glm4-moe": Family("glm4_moe", EXPERTS | SMALL_HEADS | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}),
    "minimax m2": Family("minimax_m2", EXPERTS | SMALL_HEADS | {"rotary_dim": 8}),
    "phi-moe, window in the mask alone": Family(
        "phimoe", EXPERTS | {"sliding_window": WINDOW, **rope("default")}, windows=SLIDING
    ),
    "gpt-oss": Family("gpt_oss", EXPERTS | SMALL_HEADS | HALF | rope("default"), windows=HALF_SLIDING),
    "deepseek v3": Family(
        "deepseek_v3", EXPERTS | LATENT | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    ),
    # Models that are refused.
    "llama4": Family(
        "llama4_text",
        EXPERTS | SMALL_HEADS | {"attention_chunk_size": WINDOW, "intermediate_size_mlp": 96},
        refused="attends in chunks",
    ),
    "diffllama": Family("diffllama", {}, refused="differ from its own"),
    "bloom": Family("bloom", {"n_head": 4, "n_layer": 2}, refused="does not let its attention be replaced"),
    "falcon": Family(
        "falcon",
        {"num_kv_heads": 2, "new_decoder_architecture": True},
        refused="does not let its attention be replaced",
    ),
    "stablelm": Family("stablelm", {}, refused="does not let its attention be replaced"),
    "mamba": Family("mamba", {"state_size": 8}, refused="remember something else"),
    "mamba2": Family(
        "mamba2", {"state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 1}, refused="remember something else"
    ),
    "falcon-h1": Family(
        "falcon_h1",
        {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_d_ssm": 128},
        refused="remember something else",
    ),
    "lfm2": Family("lfm2", {"layer_types": ["conv", "full_attention"]}, refused="remember something else"),
    "qwen3-next": Family(
        "qwen3_next",
        EXPERTS | {"layer_types": ["linear_attention", "full_attention"]},
        refused="remember something else",
    ),
    "qwen3.5": Family(
        "qwen3_5_text", {"layer_types": ["linear_attention", "full_attention"]}, refused="remember something else"
    ),
    "granite, mamba layers": Family(
        "granitemoehybrid",
        EXPERTS
        | {
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "shared_intermediate_size": 32,
        },
        refused="remember something else",
    ),
}
