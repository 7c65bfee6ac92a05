"""The weights of a GGUF in its own bits: a file beside the whole weights that the GGUF was converted to is written and
read here. What a GGUF's bits mean, gguf_groups.py says. No model is made here.

The file is one of safetensors with the metadata `version`. Of each matrix it has NAME.numbers, NAME.scales and perhaps
NAME.minima, in the model's order: what Groups has, but for numbers of 4 bits, which are 8 higher, two in a byte, the
first in the lower half.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from worker_service.engine.few_bits import Groups
from worker_service.gguf_groups import groups
from worker_service.model_files import STORED, ModelError

_VERSION = "1"
_LIFT = 8  # what makes signed numbers of 4 bits positive


def keep(gguf: Path, model: Any, folder: Path) -> None:
    """Write the file into `folder`, if the GGUF has matrices of few bits. `model`: what transformers makes of the GGUF.
    Its table of names is used, and its way to put rows into its own order. Raises ModelError."""
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    reader = GGUFReader(gguf)
    architecture = reader.fields["general.architecture"].contents()
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    names, modules = get_gguf_hf_weights_map(model, processor), dict(model.named_modules())

    def ordered(rows: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
        more: dict[str, Any] = {"tensor_key_mapping": names, "parsed_parameters": {"tensors": {}}}
        found: npt.NDArray[Any] = processor.process(weights=rows, name=name, **more).weights
        return found

    tensors: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        name = names.get(tensor.name, "")
        if type(modules.get(name.removesuffix(".weight"))) not in (torch.nn.Linear, torch.nn.Embedding):
            continue
        if (few := groups(tensor.tensor_type.name, tensor.data)) is None:
            continue
        rows = ordered(np.arange(len(tensor.data))[:, None], tensor.name)
        if sorted(rows.ravel()) != list(range(len(tensor.data))):
            raise ModelError(f"{gguf} has {tensor.name} in another form than transformers")
        index = torch.from_numpy(np.array(rows[:, 0]))
        tensors[f"{name}.numbers"] = _packed(few.bits, few.numbers[index])
        tensors[f"{name}.scales"] = few.scales[index]
        if few.minima is not None:
            tensors[f"{name}.minima"] = few.minima[index]
    if tensors:
        save_file(tensors, folder / STORED, {"version": _VERSION})


def kept(folder: Path) -> Mapping[str, Callable[[], Groups]]:
    """What was kept of each matrix, by its name, to be read when called. Empty: nothing was. Raises ModelError."""
    if not (folder / STORED).is_file():
        return {}
    try:
        file: Any = safe_open(folder / STORED, "pt")
        version, names = (file.metadata() or {}).get("version"), set(file.keys())
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot load {folder / STORED}: {error}") from error
    if version != _VERSION:
        raise ModelError(
            f"{folder / STORED} is of version {version}, not {_VERSION}: delete {folder} and pull it again"
        )

    def read(name: str) -> Groups:
        numbers, minima = file.get_tensor(f"{name}.numbers"), f"{name}.minima"
        bits = 4 if numbers.dtype == torch.uint8 else 8
        signed, scales = _unpacked(numbers) if bits == 4 else numbers, file.get_tensor(f"{name}.scales")
        return Groups(bits, signed, scales, file.get_tensor(minima) if minima in names else None)

    return {name: partial(read, name) for name in (n.removesuffix(".numbers") for n in names if n.endswith(".numbers"))}


def _packed(bits: int, numbers: torch.Tensor) -> torch.Tensor:
    if bits == 8:
        return numbers
    lifted = (numbers + _LIFT).to(torch.uint8)
    return lifted[:, ::2] | lifted[:, 1::2] << 4


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack([packed & 15, packed >> 4], -1).view(len(packed), -1).to(torch.int8) - _LIFT
