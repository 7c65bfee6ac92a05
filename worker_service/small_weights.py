"""Models whose weights stay small in memory: quantised while they are read, or as a GGUF has them. One matrix is whole
at a time. Models whose weights are whole, models.py loads."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open

from worker_service.capacity import model_class
from worker_service.engine import native
from worker_service.engine.few_bits import Groups, quantise
from worker_service.engine.packed import Packed, PackedEmbedding, PackedLinear
from worker_service.gguf_groups import groups
from worker_service.model_files import GGUF, ModelError

_BITS = {"int8": 8, "int4": 4}
_GROUP = 32  # inputs that are no multiple of it stay whole

Source = Mapping[str, Callable[[], torch.Tensor | Groups]]  # of each parameter of a model, by its name


def check_weights_kind(weights: str, folder: Path, config: Any, place: torch.device, processes: int) -> None:
    """Raises ModelError unless weights of this kind can be had of this model, at this place."""
    if place.type != "cpu" or processes > 1 or native.kernels() is None:
        where = f"{processes} processes" if processes > 1 else f"{place}" if place.type != "cpu" else "no C++ compiler"
        raise ModelError(f"weights {weights}: only one process on a CPU with native kernels keeps them; here: {where}")
    if weights == "stored" and not (folder / GGUF).is_file():
        raise ModelError(
            f"weights stored: {folder} holds no {GGUF}; `laps-sd pull` keeps the one that it converts, so delete the "
            "folder and pull a GGUF again, or take int8"
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
    source = _stored(folder / GGUF, model) if weights == "stored" else _quantised(folder, model, _BITS[weights])
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
        if isinstance(table, PackedEmbedding):
            model.set_output_embeddings(PackedLinear(head, table.packed))
        else:
            head.weight = table.weight
    if missing := sorted(name for name, own in model.named_parameters() if own.is_meta):
        raise ModelError(f"{folder}: {len(missing)} weights are not in its files; the first is {missing[0]}")


def _quantised(folder: Path, model: Any, bits: int) -> Source:
    """Of safetensors; what is multiplied becomes small, the head in 8 bits at least."""
    source: dict[str, Callable[[], torch.Tensor | Groups]] = {}
    tied, head = getattr(model.config, "tie_word_embeddings", False), model.get_output_embeddings()
    table, modules = model.get_input_embeddings(), dict(model.named_modules())

    def read(file: Any, name: str) -> torch.Tensor | Groups:
        module = modules.get(name.removesuffix(".weight"))
        tensor: torch.Tensor = file.get_tensor(name)
        multiplied = isinstance(module, torch.nn.Linear) or (tied and type(module) is torch.nn.Embedding)
        if not multiplied or tensor.dim() != 2 or tensor.shape[1] % _GROUP:
            return tensor
        try:
            return quantise(tensor, 8 if module in (head, table) else bits)
        except ValueError as error:
            raise ModelError(f"{folder}: {name}: {error}") from error

    for path in sorted(folder.glob("*.safetensors")):
        file: Any = safe_open(path, "pt")
        source |= {name: partial(read, file, name) for name in file.keys()}  # noqa: SIM118
    return source


def _stored(file: Path, model: Any) -> Source:
    """Of a GGUF, by transformers' table of names, and its way to put rows into its own order."""
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    reader = GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    names = get_gguf_hf_weights_map(model, processor)
    modules = dict(model.named_modules())

    def read(tensor: Any) -> torch.Tensor | Groups:
        module = modules.get(names[tensor.name].removesuffix(".weight"))
        few = (
            groups(tensor.tensor_type.name, tensor.data)
            if type(module) in (torch.nn.Linear, torch.nn.Embedding)
            else None
        )
        if few is None:
            return torch.from_numpy(np.array(ordered(dequantize(tensor.data, tensor.tensor_type), tensor.name)))
        rows = ordered(np.arange(len(tensor.data))[:, None], tensor.name)
        if sorted(rows.ravel()) != list(range(len(tensor.data))):
            raise ModelError(f"weights stored: {file.name} has {tensor.name} in another form than transformers")
        index = torch.from_numpy(np.array(rows[:, 0]))
        minima = None if few.minima is None else few.minima[index]
        return Groups(few.bits, few.numbers[index], few.scales[index], minima)

    def ordered(weights: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = processor.process(
            weights=weights, name=name, tensor_key_mapping=names, parsed_parameters={"tensors": {}}
        ).weights
        return found

    return {names[each.name]: partial(read, each) for each in reader.tensors if each.name in names}
