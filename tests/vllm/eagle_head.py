"""A head in EAGLE's format for a small Llama, made on the spot: it guesses that the target says the same token again,
give or take a little noise. No assertions live here."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

NOISE = 0.002


def made(target: Path, folder: Path) -> Path:
    """Its folder. `target`: the model's."""
    config = json.loads((target / "config.json").read_text())
    wide, inner, heads = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    keys = heads * config["num_key_value_heads"]
    torch.manual_seed(0)
    layer = {
        "self_attn.q_proj": (wide, wide), "self_attn.k_proj": (keys, wide), "self_attn.v_proj": (keys, wide),
        "self_attn.o_proj": (wide, wide), "mlp.gate_proj": (inner, wide), "mlp.up_proj": (inner, wide),
        "mlp.down_proj": (wide, inner),
    }  # fmt: skip
    weights = {f"layers.0.{name}.weight": NOISE * torch.randn(shape) for name, shape in layer.items()}
    weights["layers.0.post_attention_layernorm.weight"] = torch.ones(wide)
    weights["fc.weight"] = torch.cat([torch.zeros(wide, wide), torch.eye(wide)], dim=1)  # the target's hidden state
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return folder
