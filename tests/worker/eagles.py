"""EAGLE-3 heads of the tests' own making, in the public format, and what such a head drafts by its definition: plain
operations over the whole text, without a cache. Nothing of ours is used here."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LAYERS = [0, 1, 2]  # whose inputs are read, of a target with two: 2 is what leaves the last


def make_eagle(folder: Path, target: Any, *, draft_tokens: int = 100, seed: int = 0, **config: Any) -> Path:
    """A random head for `target`, a model of transformers. `config`: fields that differ from the usual."""
    width, vocabulary = target.config.hidden_size, target.config.vocab_size
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "vocab_size": vocabulary,
        "draft_vocab_size": draft_tokens,
        "eagle_aux_hidden_state_layer_ids": LAYERS,
    } | config
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * (2 / shape[-1]) ** 0.5

    q, kv = (fields[f"num_{name}_heads"] * fields["head_dim"] for name in ("attention", "key_value"))
    inner = fields["intermediate_size"]
    chosen = torch.randperm(vocabulary, generator=generator)[:draft_tokens].sort().values
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    tensors = {
        "fc.weight": weight(width, len(LAYERS) * width),
        "midlayer.self_attn.q_proj.weight": weight(q, 2 * width),
        "midlayer.self_attn.k_proj.weight": weight(kv, 2 * width),
        "midlayer.self_attn.v_proj.weight": weight(kv, 2 * width),
        "midlayer.self_attn.o_proj.weight": weight(width, q),
        "midlayer.mlp.gate_proj.weight": weight(inner, width),
        "midlayer.mlp.up_proj.weight": weight(inner, width),
        "midlayer.mlp.down_proj.weight": weight(width, inner),
        "lm_head.weight": weight(draft_tokens, width),
        **{f"{name}.weight": 1 + 0.2 * weight(width) for name in norms},
        "d2t": chosen - torch.arange(draft_tokens),
        "t2d": torch.isin(torch.arange(vocabulary), chosen),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "model.safetensors")
    return folder


class Reference:
    """A head on `target`, by its definition."""

    def __init__(self, folder: Path, target: Any) -> None:
        self._config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        self._weights = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
        self._target = target

    @torch.inference_mode()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """The `count` likeliest tokens, one by one, after `tokens`."""
        hidden = self._fused(tokens[:-1])
        text, found = list(tokens), []
        for _ in range(count):
            known = self._layer(hidden, text[1:])
            best = int((self._norm(known[-1:], "norm") @ self._weights["lm_head.weight"].T).argmax())
            found.append(best + int(self._weights["d2t"][best]))
            hidden = torch.cat([hidden, known[-1:]])  # in place of what the target would know
            text.append(found[-1])
        return found

    def _fused(self, tokens: Sequence[int]) -> Tensor:
        entering: list[Tensor] = []
        hook = self._target.model.norm.register_forward_pre_hook(lambda _, inputs: entering.append(inputs[0]))
        output = self._target(torch.tensor([tokens]), output_hidden_states=True)
        hook.remove()
        states = [*output.hidden_states[:-1], entering[0]]
        return torch.cat([states[layer][0] for layer in LAYERS], -1) @ self._weights["fc.weight"].T

    def _layer(self, hidden: Tensor, tokens: Sequence[int]) -> Tensor:
        """[n, width] to [n, width]: `tokens` [n] are those after each position."""
        config, n = self._config, len(tokens)
        heads, kv_heads, dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        embeds = self._target.get_input_embeddings().weight[torch.tensor(tokens)]
        normed = self._norm(hidden, "midlayer.hidden_norm")
        both = torch.cat([self._norm(embeds, "midlayer.input_layernorm"), normed], -1)
        q, k, v = ((both @ self._weights[f"midlayer.self_attn.{x}_proj.weight"].T).view(n, -1, dim) for x in "qkv")
        q, k = self._turned(q), self._turned(k)
        k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / dim**0.5
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf).softmax(-1)
        attended = torch.einsum("hij,jhd->ihd", scores, v).reshape(n, -1)
        if config.get("norm_before_residual"):
            hidden = normed
        hidden = hidden + attended @ self._weights["midlayer.self_attn.o_proj.weight"].T
        normed = self._norm(hidden, "midlayer.post_attention_layernorm")
        gate, up, down = (self._weights[f"midlayer.mlp.{x}_proj.weight"] for x in ("gate", "up", "down"))
        return hidden + (torch.nn.functional.silu(normed @ gate.T) * (normed @ up.T)) @ down.T

    def _turned(self, x: Tensor) -> Tensor:
        """Rotated by position, which is the place in the text."""
        n, _, dim = x.shape
        rates = self._config["rope_theta"] ** -(torch.arange(0, dim, 2) / dim)
        angles = (torch.arange(n)[:, None] * rates)[:, None]
        low, high = x.chunk(2, -1)
        return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return (
            x
            * (x.pow(2).mean(-1, keepdim=True) + self._config["rms_norm_eps"]) ** -0.5
            * self._weights[f"{name}.weight"]
        )
