"""The weights of a GGUF in its own bits: a file beside the whole weights that the GGUF was converted to is written and
read here. What a GGUF's bits mean, gguf_groups.py says. No model is made here.

The file is one of safetensors with the metadata `version`, and `weights`, a digest of the whole weights (both
ends of each), which may be changed later. Of each matrix it has NAME.numbers, NAME.scales and perhaps
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
from worker_service.identity import weights_digest
from worker_service.model_files import STORED, ModelError

_VERSION = "1"
_LIFT = 8  # what makes signed numbers of 4 bits positive


def keep(gguf: Path, model: Any, folder: Path) -> None:
    """Write the file into `folder`, if the GGUF has matrices of few bits. `model`: what transformers makes of the GGUF.
    Its whole weights are in `folder` already. Its table of names is used, and its way to put rows into its own order; a
    matrix that it has otherwise is left out. Raises ModelError."""
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
        try:
            rows = ordered(np.arange(len(tensor.data))[:, None], tensor.name).ravel()
        except ValueError:  # transformers does more than to put rows into another order
            continue
        if sorted(rows) != list(range(len(tensor.data))):
            continue
        index = torch.from_numpy(np.array(rows))
        tensors[f"{name}.numbers"] = _packed(few.bits, few.numbers[index])
        tensors[f"{name}.scales"] = few.scales[index]
        if few.minima is not None:
            tensors[f"{name}.minima"] = few.minima[index]
    if tensors:
        save_file(tensors, folder / STORED, {"version": _VERSION, "weights": weights_digest(folder)})


def kept(folder: Path) -> Mapping[str, Callable[[], Groups]]:
    """The kept matrices by name; calling one reads it. Empty: none were kept. Raises ModelError, at a call too."""
    if not (folder / STORED).is_file():
        return {}
    try:
        file: Any = safe_open(folder / STORED, "pt")
        about, names = file.metadata() or {}, set(file.keys())
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot load {folder / STORED}: {error}") from error
    if (version := about.get("version")) != _VERSION:
        raise ModelError(
            f"{folder / STORED} is of version {version}, not {_VERSION}: delete {folder} and pull it again"
        )
    if about.get("weights") != weights_digest(folder):
        raise ModelError(f"{folder / STORED} is not of the weights in {folder}, which have changed: delete the file")

    def read(name: str) -> Groups:
        numbers, scales = file.get_tensor(f"{name}.numbers"), file.get_tensor(f"{name}.scales")
        minima = file.get_tensor(f"{name}.minima") if f"{name}.minima" in names else None
        bits = 4 if numbers.dtype == torch.uint8 else 8
        found = Groups(bits, _unpacked(numbers) if bits == 4 else numbers, scales, minima)
        if not _fit(found):
            raise ModelError(f"{folder / STORED} is damaged: the parts of {name} do not fit together")
        return found

    return {name: partial(read, name) for name in (n.removesuffix(".numbers") for n in names if n.endswith(".numbers"))}


def _fit(found: Groups) -> bool:
    """Whether the groups of numbers, scales and minima are the same ones, of a size and of types that kernels take."""
    parts = [part for part in (found.scales, found.minima) if part is not None]
    if found.numbers.dtype != torch.int8 or {part.dtype for part in parts} not in ({torch.float16}, {torch.float32}):
        return False
    shapes = [part.shape for part in parts]
    if not all(len(shape) == 2 for shape in (found.numbers.shape, *shapes)):
        return False
    (n, k), groups = found.numbers.shape, shapes[0][1]
    return all(shape == (n, groups) for shape in shapes) and groups > 0 and k % groups == 0 and k // groups % 16 == 0


def _packed(bits: int, numbers: torch.Tensor) -> torch.Tensor:
    if bits == 8:
        return numbers
    lifted = (numbers + _LIFT).to(torch.uint8)
    return lifted[:, ::2] | lifted[:, 1::2] << 4


def _unpacked(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack([packed & 15, packed >> 4], -1).view(len(packed), -1).to(torch.int8) - _LIFT
