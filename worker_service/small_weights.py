"""Models whose weights stay small in memory: quantised while they are read, or as a GGUF had them. One matrix is whole
at a time. Models whose weights are whole, models.py loads."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from worker_service.capacity import model_class
from worker_service.engine import native
from worker_service.engine.few_bits import Groups, quantise
from worker_service.engine.packed import Packed, PackedEmbedding, PackedLinear
from worker_service.model_files import STORED, ModelError, loaded_files
from worker_service.stored_bits import kept

_BITS = {"int8": 8, "int4": 4}
_GROUP = 32  # inputs that are no multiple of it stay whole

Source = Mapping[str, Callable[[], torch.Tensor | Groups]]  # of each parameter of a model, by its name


def check_weights_kind(weights: str, folder: Path, config: Any, place: torch.device, processes: int) -> None:
    """Raises ModelError unless weights of this kind can be had of this model, at this place."""
    here = ""
    if processes > 1:
        here = f"{processes} processes"
    elif place.type != "cpu":
        here = str(place)
    elif native.kernels() is None:
        here = "no kernels; a warning in the log says why"
    if here:
        raise ModelError(f"weights {weights}: only one process on a CPU with native kernels keeps them; here: {here}")
    if weights == "stored" and not (folder / STORED).is_file():
        raise ModelError(
            f"weights stored: {folder} holds no {STORED}, which `laps-sd pull` makes of a GGUF that has few bits; of "
            "other weights take int8"
        )
    if getattr(config, "quantization_config", None):
        raise ModelError(f"weights {weights}: the weights in {folder} are quantised already; leave it at auto")


def load_small(folder: Path, config: Any, weights: str, dtype: torch.dtype) -> Any:
    """A causal LM of transformers whose linear layers, and embeddings if its head is tied to them, are of few bits.

    `weights`: int8, int4 or stored; `dtype`: of activations and of what stays whole. Raises ModelError, and what
    reading raises.
    """
    from accelerate import init_empty_weights  # a bare machine that checks its GPU lacks it

    with init_empty_weights():
        model = model_class(config)._from_config(config, dtype=dtype)
    if weights == "stored":
        source: Source = {**_whole(folder), **kept(folder)}
    else:
        source = _quantised(folder, model, _BITS[weights])
    _fill(model, source, folder)
    if (folder / "generation_config.json").is_file():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def _fill(model: Any, source: Source, folder: Path) -> None:
    """Put the parameters of `source` into the model, whose own are on no device."""
    dtype, head, parameters = model.dtype, model.get_output_embeddings(), dict(model.named_parameters())
    # Biases come first: a packed layer takes its bias along.
    for name in sorted(parameters.keys() & source.keys(), key=lambda name: (name.endswith(".weight"), name)):
        owner, _, part = name.rpartition(".")
        module, found = model.get_submodule(owner), source[name]()
        shape = found.numbers.shape if isinstance(found, Groups) else found.shape
        if shape != parameters[name].shape:
            raise ModelError(f"{folder}: {name} has shape {list(shape)}, not {list(parameters[name].shape)}")
        if not isinstance(found, Groups):
            setattr(module, part, torch.nn.Parameter(found.to(dtype), requires_grad=False))
        elif isinstance(module, torch.nn.Linear):
            result = torch.float32 if module is head else dtype
            model.set_submodule(owner, PackedLinear(module, Packed(found), result))
        else:
            model.set_submodule(owner, PackedEmbedding(Packed(found), dtype))
    table = model.get_input_embeddings()
    if getattr(model.config, "tie_word_embeddings", False):
        _check_tied(model, source, folder)
        if isinstance(table, PackedEmbedding):
            model.set_output_embeddings(PackedLinear(head, table.packed))
        else:
            head.weight = table.weight
    if missing := sorted(name for name, own in model.named_parameters() if own.is_meta):
        raise ModelError(f"{folder}: {len(missing)} weights are not in its files; the first is {missing[0]}")


def _check_tied(model: Any, source: Source, folder: Path) -> None:
    """Transformers does not tie a head of the files that is not the embeddings, whatever the configuration says."""
    parts = model.get_output_embeddings(), model.get_input_embeddings()
    named = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    head, table = (source.get(named[id(part)]) for part in parts)
    if head and table and not torch.equal(_numbers(head()), _numbers(table())):
        raise ModelError(
            f"{folder}: its head is not its embeddings, though its configuration ties them: take whole weights"
        )


def _numbers(found: torch.Tensor | Groups) -> torch.Tensor:
    return found.weight() if isinstance(found, Groups) else found.float()


def _whole(folder: Path) -> dict[str, Callable[[], torch.Tensor]]:
    source: dict[str, Callable[[], torch.Tensor]] = {}
    for path in loaded_files(folder):
        file: Any = safe_open(path, "pt")
        source |= {name: partial(file.get_tensor, name) for name in file.keys()}  # noqa: SIM118
    return source


def _quantised(folder: Path, model: Any, bits: int) -> Source:
    """Of whole weights; what is multiplied becomes small, the head in 8 bits at least."""
    tied, head = getattr(model.config, "tie_word_embeddings", False), model.get_output_embeddings()
    table, modules = model.get_input_embeddings(), dict(model.named_modules())

    def few(name: str, read: Callable[[], torch.Tensor]) -> torch.Tensor | Groups:
        module, tensor = modules.get(name.removesuffix(".weight")), read()
        multiplied = isinstance(module, torch.nn.Linear) or (tied and type(module) is torch.nn.Embedding)
        if not multiplied or tensor.dim() != 2 or tensor.shape[1] % _GROUP:
            return tensor
        try:
            return quantise(tensor, 8 if module in (head, table) else bits)
        except ValueError as error:
            raise ModelError(f"{folder}: {name}: {error}") from error

    return {name: partial(few, name, read) for name, read in _whole(folder).items()}
