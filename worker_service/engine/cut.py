"""A model of which this process has some layers only: which ones, and what stands where the others were. Nothing is
sent or computed here, and no weights of other layers are read: a model is cut before its weights are loaded.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch

from worker_service.engine.shape import text_config
from worker_service.engine.types import Place

_OWN = "laps_sd_layers"
_QUIET = {"_keys_to_ignore_on_load_unexpected": [".*"]}  # other stages' weights are in the same files
# What a layer may be given beside hidden states: each stage knows it by itself, or it is never there.
_KNOWN = {
    "hidden_states", "attention_mask", "position_ids", "position_embeddings", "cache", "past_key_values",
    "layer_past", "use_cache", "encoder_hidden_states", "encoder_attention_mask", "kwargs",
}  # fmt: skip


def cut(kind: Any, place: Place) -> Any:
    """The class of transformers `kind`, but its models have this stage's layers alone. The first stage has embeddings
    and output head too, for drafters read both, and logits are far longer than the hidden states they are made of.
    """

    def init(self: Any, config: Any, *arguments: Any, **options: Any) -> None:
        kind.__init__(self, config, *arguments, **options)
        _keep(self, place)

    return type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__} | _QUIET)


def own_layers(model: Any) -> range:
    """The numbers of the layers that this process has: all, unless the model was cut."""
    found: range = getattr(model, _OWN, None) or range(text_config(model.config).num_hidden_layers)
    return found


def layer_list(model: Any) -> torch.nn.ModuleList:
    """All layers of its language model, those of other stages as `LayerElsewhere`. Raises ValueError."""
    count = text_config(model.config).num_hidden_layers
    for module in model.get_decoder().modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return module
    raise ValueError(f"the layers of {type(model).__name__} are not where they are looked for")


class LayerElsewhere(torch.nn.Module):
    """In place of a layer that another stage has. `instead`: from the hidden states that come in [1, T, hidden size]
    to those that go on; None: they go on unchanged."""

    def __init__(self, layer: torch.nn.Module) -> None:
        """Has what the model's own code may ask `layer` about, such as its kind of attention."""
        super().__init__()
        for name, value in vars(layer).items():
            if isinstance(value, (str, int, float)) and not name.startswith("_") and name != "training":
                setattr(self, name, value)
        self.instead: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states if self.instead is None else self.instead(hidden_states)


class NoEmbedding(torch.nn.Module):
    """In place of embeddings that the first stage has: zeros, which are replaced behind the layers before ours."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width, self.dtype = width, torch.float32

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*ids.shape, self._width, dtype=self.dtype, device=ids.device)


class NoHead(torch.nn.Identity):
    """In place of an output head that the first stage has."""


def _keep(model: Any, place: Place) -> None:
    layers, width = layer_list(model), text_config(model.config).hidden_size
    own = place.layers(len(layers))
    if more := sorted({name for layer in layers for name in signature(layer.forward).parameters} - _KNOWN):
        raise ValueError(f"its layers hand on {', '.join(more)}, so they cannot be spread over stages")
    for number in set(range(len(layers))).difference(own):
        layers[number] = LayerElsewhere(layers[number])
    setattr(model, _OWN, own)
    if place.number:
        model.set_input_embeddings(NoEmbedding(width))
        model.set_output_embeddings(NoHead())
        model.all_tied_weights_keys = {}
