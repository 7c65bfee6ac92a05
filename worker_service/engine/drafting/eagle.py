"""A draft head of the EAGLE-3 kind (Li et al., 2025, arXiv 2503.01840) as public checkpoints hold it: one layer of a
Llama, over what the target knew in some of its layers and the token that came next. No requests are known here.

A checkpoint is a folder with config.json and the tensors `fc`, `midlayer.*` (or `layers.0.*`), `norm`, `lm_head`, `d2t`
and `t2d`, as the paper's authors, SpecForge, vLLM and SGLang write or read them.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch.nn import Linear, ModuleDict, RMSNorm
from torch.nn.functional import silu

from worker_service.engine.llama import LlamaConfig as PlainConfig
from worker_service.engine.llama import Rotary, plain_config, turned
from worker_service.engine.weights_file import save_weights

if TYPE_CHECKING:
    from transformers import LlamaConfig

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_OLD_WEIGHTS = "pytorch_model.bin"
_VOCABULARY = "laps_sd_vocabulary"  # our own field: digest of the target's tokens

# Of queries, keys and values [n, heads or kv heads, dim] the attended values [n, heads, dim].
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """What config.json says. `raw` is all of it."""

    raw: Mapping[str, Any]
    layer: "PlainConfig | LlamaConfig"  # of the head's one layer
    target_hidden_size: int
    target_layers: tuple[int, ...] | None  # whose inputs it reads, see Target.expose; None: see `layers_of`
    draft_tokens: int
    biased: bool  # its attention's products
    norm_before_residual: bool  # what the layer's results are added to is normed, too

    @property
    def vocabulary(self) -> str | None:
        return self.raw.get(_VOCABULARY)

    def layers_of(self, count: int) -> tuple[int, ...]:
        """The layers that it reads, of a target with `count`. Those that all tools agree on where it says none."""
        return tuple(sorted({2, count // 2, count - 3})) if self.target_layers is None else self.target_layers


def parse_config(raw: Mapping[str, Any]) -> EagleConfig:
    """Raises ValueError, with a message for people."""
    own = raw.get("transformer_layer_config") or raw  # the former in those of speculators
    nested = raw.get("eagle_config") or {}
    with _blaming_the_config():
        layer = _layer_config(own)
        # The nested field counts a layer by what leaves it, the other by what enters it.
        layers = raw.get("eagle_aux_hidden_state_layer_ids")
        if not layers:
            layers = [int(number) + 1 for number in nested.get("eagle_aux_hidden_state_layer_ids") or ()]
        config = EagleConfig(
            raw,
            layer,
            int(raw.get("target_hidden_size") or layer.hidden_size),
            tuple(int(number) for number in layers) or None,
            int(raw.get("draft_vocab_size") or layer.vocab_size),
            bool(own.get("attention_bias")),
            bool(raw.get("norm_before_residual", False)),
        )
    sizes = (layer.hidden_size, config.target_hidden_size, config.draft_tokens, layer.vocab_size)
    if min(sizes) < 1:
        raise ValueError(f"its {CONFIG} is not that of an EAGLE-3 head: it has sizes {', '.join(map(str, sizes))}")
    if own.get("model_type", "llama") != "llama" or layer.hidden_act != "silu":
        raise ValueError(f"its layer is one of {own.get('model_type')} with {layer.hidden_act}, not of a Llama")
    saying = own, own.get("rope_parameters"), own.get("rope_scaling")
    parts = [said.get("partial_rotary_factor") for said in saying if isinstance(said, dict)]
    if partly := [part for part in parts if part not in (None, 1)]:
        raise ValueError(f"positions turn {partly[0]} of each of its heads' numbers, not all")
    if layer.num_hidden_layers != 1 or not nested.get("use_aux_hidden_state", True):
        raise ValueError(f"it has {layer.num_hidden_layers} layers or reads only one of the target: no EAGLE-3 head")
    return config


def _layer_config(said: Mapping[str, Any]) -> "PlainConfig | LlamaConfig":
    """Raises whatever transformers makes of it."""
    others = {name for name in said if "rope" in name or "rotary" in name or name == "attention_bias"}
    scaled = any(said[name] for name in others - {"rope_theta", "rope_parameters"})
    if not scaled and (plain := plain_config(said)):
        return replace(plain, hidden_act=said.get("hidden_act", "silu"))
    from transformers import LlamaConfig  # takes seconds: no worker waits for it with a head of the plain kind

    return LlamaConfig(**{name: value for name, value in said.items() if name != "architectures"})


class EagleHead(torch.nn.Module):
    """Its parameters and buffers have the names of the public format. Embeddings are the target's, or its own."""

    d2t: torch.Tensor  # [draft tokens]: what must be added to a draft token to make it the target's
    t2d: torch.Tensor  # [vocabulary]: whether a token of the target's is a draft token

    def __init__(
        self, config: EagleConfig, target_layers: int, *, embeddings: bool = False, shapes_only: bool = False
    ) -> None:
        """`target_layers`: how many layers of the target it reads. `embeddings`: it has a table of its own.
        `shapes_only`: it is never called."""
        super().__init__()
        layer, d = config.layer, config.layer.hidden_size
        self.config, self._dim = config, layer.head_dim

        def linear(inputs: int, outputs: int, bias: bool = False) -> Linear:
            return Linear(inputs, outputs, bias=bias)

        q, kv = layer.num_attention_heads * self._dim, layer.num_key_value_heads * self._dim
        inner, biased = layer.intermediate_size, config.biased
        self.fc = linear(target_layers * config.target_hidden_size, d)
        self.midlayer = ModuleDict(
            {
                "self_attn": ModuleDict(
                    {
                        "q_proj": linear(2 * d, q, biased),
                        "k_proj": linear(2 * d, kv, biased),
                        "v_proj": linear(2 * d, kv, biased),
                        "o_proj": linear(q, d, biased),
                    }
                ),
                "mlp": ModuleDict(
                    {"gate_proj": linear(d, inner), "up_proj": linear(d, inner), "down_proj": linear(inner, d)}
                ),
                **{
                    name: RMSNorm(d, layer.rms_norm_eps)
                    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
                },
            }
        )
        self.norm = RMSNorm(d, layer.rms_norm_eps)
        self.lm_head = linear(d, config.draft_tokens)
        self.register_buffer("d2t", torch.zeros(config.draft_tokens, dtype=torch.long))
        self.register_buffer("t2d", torch.zeros(layer.vocab_size, dtype=torch.bool))
        self.embed_tokens = torch.nn.Embedding(layer.vocab_size, d) if embeddings else None
        self._rotary = torch.nn.Identity() if shapes_only else _rotary(layer)

    @property
    def draft_ids(self) -> torch.Tensor:
        """[draft tokens]: the target's id of each."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def forward(
        self, hidden: torch.Tensor, embeds: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """What the head knows [n, hidden] after tokens with `embeds` [n, hidden].

        Of each: `hidden` [n, hidden], made by `fc` of what the target knew before it, or returned by the last call;
        `positions` [n] of the token before it."""
        layer: Any = self.midlayer
        attention, mlp = layer["self_attn"], layer["mlp"]
        normed = layer["hidden_norm"](hidden)
        both = torch.cat([layer["input_layernorm"](embeds), normed], -1)
        q, k, v = (attention[f"{name}_proj"](both).unflatten(-1, (-1, self._dim)) for name in "qkv")
        cosine, sine = self._rotary(hidden, positions[None])
        q, k = (turned(each, cosine[0, :, None], sine[0, :, None]) for each in (q, k))
        hidden = normed if self.config.norm_before_residual else hidden
        hidden = hidden + attention["o_proj"](attend(q, k, v).flatten(1))
        normed = layer["post_attention_layernorm"](hidden)
        result: torch.Tensor = hidden + mlp["down_proj"](silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed))
        return result

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, draft tokens], of what `forward` returned."""
        result: torch.Tensor = self.lm_head(self.norm(hidden))
        return result


def _rotary(layer: "PlainConfig | LlamaConfig") -> torch.nn.Module:
    if isinstance(layer, PlainConfig):
        return Rotary(layer)
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary: torch.nn.Module = LlamaRotaryEmbedding(layer)
    return rotary


def save_eagle(head: EagleHead, folder: Path) -> None:
    """Into `folder`, in bfloat16, as others read it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(dict(head.config.raw), indent=2) + "\n")
    tensors = {name: value.detach() for name, value in head.state_dict().items()}
    save_weights({n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()}, folder / WEIGHTS)


def load_eagle(folder: Path) -> EagleHead:
    """Raises ValueError or OSError, with a message for people."""
    try:
        raw = json.loads((folder / CONFIG).read_text())
    except ValueError as error:
        raise ValueError(f"its {CONFIG} is no JSON: {error}") from error
    config, tensors = parse_config(raw), _tensors(folder)
    fused = tensors["fc.weight"].shape[-1] if "fc.weight" in tensors else 0
    if fused % config.target_hidden_size:
        raise ValueError(f"its fc takes {fused} numbers, which are no hidden states of {config.target_hidden_size}")
    layers, own_embeddings = max(fused // config.target_hidden_size, 1), "embed_tokens.weight" in tensors
    with _blaming_the_config(), torch.device("meta"):  # no memory for sizes that the files do not have
        expected = EagleHead(config, layers, embeddings=own_embeddings, shapes_only=True).state_dict()
    if config.draft_tokens == config.layer.vocab_size:  # the maps may be left out where they say nothing
        tensors.setdefault("d2t", torch.zeros(config.draft_tokens, dtype=torch.long))
        tensors.setdefault("t2d", torch.ones(config.draft_tokens, dtype=torch.bool))
    if missing := sorted(expected.keys() - tensors.keys() - {"t2d"}):
        raise ValueError(f"{len(missing)} tensors of an EAGLE-3 head are not in its files; the first is {missing[0]}")
    if strange := sorted(tensors.keys() - expected.keys()):
        raise ValueError(f"it has {len(strange)} tensors that no EAGLE-3 head has; the first is {strange[0]}")
    for name, found in tensors.items():
        if found.shape != expected[name].shape:
            sizes = " instead of ".join(str(tuple(tensor.shape)) for tensor in (found, expected[name]))
            raise ValueError(f"its {name} has the shape {sizes}")
    with _blaming_the_config():
        head = EagleHead(config, layers, embeddings=own_embeddings)
    head.load_state_dict(tensors, strict=False)
    ids = head.draft_ids
    if int(ids.min()) < 0 or int(ids.max()) >= config.layer.vocab_size:
        raise ValueError(f"its d2t leads to tokens that are not among its {config.layer.vocab_size}")
    return head.requires_grad_(False).eval()


@contextmanager
def _blaming_the_config() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever its values and sizes make of the library's code
        raise ValueError(f"its {CONFIG} is not that of an EAGLE-3 head: {_on_a_line(error)}") from error


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Of all its files, under the names of this module."""
    files = sorted(folder.glob("*.safetensors"))
    try:
        if files:
            found = {name: tensor for file in files for name, tensor in load_file(file).items()}
        else:
            found = torch.load(folder / _OLD_WEIGHTS, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # of safetensors, or of the unpickler, which refuses whatever is no tensor
        raise ValueError(f"its weights cannot be read: {_on_a_line(error)}") from error
    renamed = {name.removeprefix("model.").replace("layers.0.", "midlayer.", 1): t for name, t in found.items()}
    unused = ("verifier_", "rotary_emb.", "midlayer.self_attn.rotary_emb.")
    return {name: tensor for name, tensor in renamed.items() if not name.startswith(unused)}


def _on_a_line(error: Exception) -> str:
    return " ".join(str(error).split())
