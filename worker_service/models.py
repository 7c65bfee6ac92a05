"""Models in memory: weights, tokenizer, and what the service must know of them. They are fetched by pull.py."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from worker_service import hub
from worker_service.capacity import model_class, read_config, summary
from worker_service.engine.parallel import Ranks
from worker_service.engine.shape import text_config
from worker_service.model_files import MARKER, ModelError, check_directory

_TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_SAMPLE_BYTES = 4096
_ALONE = Ranks()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal LM in eval mode on `device`, and its fast tokenizer (`.backend_tokenizer`, `.chat_template`)."""

    model: Any
    tokenizer: Any
    name: str
    fingerprint: str  # equal where weights, tokenizer and chat template are equal, whatever dtype and device
    context_tokens: int  # prompt and output together
    eos_ids: frozenset[int]
    device: torch.device
    dtype: torch.dtype


def load(path: str, device: str = "auto", dtype: str = "auto", ranks: Ranks = _ALONE) -> LoadedModel:
    """Load a Hugging Face directory. `device`: auto, cpu or cuda; `dtype`: auto, float32 or bfloat16.

    `ranks`: this process's place among those that share the model. It loads its share as transformers' tensor-parallel
    plan splits the model, but embeddings and output head whole. Raises ModelError, also for a device that is not there.
    """
    folder = Path(path)
    check_directory(folder)
    place = choose_device(device, ranks)
    number = choose_dtype(dtype, place)
    config = read_config(folder, ranks.size)
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        plan = {"distributed_config": _shares(folder, config, ranks.size)} if ranks.size > 1 else {}
        model, report = model_class(config).from_pretrained(
            folder, dtype=number, local_files_only=True, output_loading_info=True, **plan
        )
        model = model.to(place).eval()
    except torch.OutOfMemoryError:  # another time there may be more
        raise
    except Exception as error:  # of transformers and what reads weights for it, such as a quantiser that is not here
        packed = getattr(config, "quantization_config", None)
        kind = f" (weights quantised by {_method(packed)})" if packed else ""
        raise ModelError(f"cannot load {folder}{kind}: {summary(error)}") from error
    if missing := sorted(report["missing_keys"]):  # transformers would fill them at random, on every worker anew
        raise ModelError(f"{folder}: {len(missing)} weights are not in its files; the first is {missing[0]}")
    if not tokenizer.is_fast:
        raise ModelError(f"{folder}: the tokenizer has no fast form (tokenizer.json)")
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=_name(folder),
        fingerprint=fingerprint(folder),
        context_tokens=int(text_config(model.config).max_position_embeddings),
        eos_ids=_eos_ids(model, tokenizer),
        device=place,
        dtype=number,
    )


def _method(quantisation: Any) -> str:
    """The name of a quantisation in a configuration, which is a table or an object."""
    given = quantisation if isinstance(quantisation, dict) else vars(quantisation)
    return str(getattr(given.get("quant_method"), "value", given.get("quant_method")))


def _shares(folder: Path, config: Any, ranks: int) -> DistributedConfig:
    """How transformers splits this model over `ranks` devices. Raises ModelError if it cannot."""
    plan = config.base_model_tp_plan or {}
    if not any(name.endswith(".k_proj") and style == "colwise" for name, style in plan.items()):
        raise ModelError(f"{folder}: transformers has no plan to split the heads of a {config.model_type} model")
    # Drafters read the embeddings and the head's rows, and the engine splits the head itself (parallel.py).
    whole = {"model.embed_tokens": "replicate", "lm_head": "replicate"}
    return DistributedConfig(tp_size=ranks, tp_plan=whole)


def choose_device(device: str, ranks: Ranks = _ALONE) -> torch.device:
    """A device of this machine; each of several processes gets its own. Raises ModelError."""
    if ranks.size > 1 and device in ("auto", "cuda") and torch.cuda.is_available():
        if ranks.local >= torch.cuda.device_count():
            raise ModelError(f"there are {torch.cuda.device_count()} CUDA devices, none for process {ranks.local + 1}")
        return torch.device("cuda", ranks.local)
    if ranks.size > 1 and device == "cpu" and torch.cuda.is_available():
        raise ModelError("several processes share the machine's CUDA devices; for the CPU set CUDA_VISIBLE_DEVICES=''")
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"device {device!r}: this machine has no usable CUDA device; use cpu or auto")
    try:
        return torch.device(device)
    except RuntimeError:
        raise ModelError(f"unknown device {device!r}; use auto, cpu or cuda") from None


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 where it is native (CUDA, or a CPU with AVX512-BF16 or AMX), else float32."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" or _cpu_has_bfloat16() else torch.float32
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype not in known:
        raise ModelError(f"unknown dtype {dtype!r}; use auto, {' or '.join(known)}")
    return known[dtype]


def fingerprint(folder: Path) -> str:
    """Hex digest of what decides the output: every tokenizer and config file, and the weights.

    Of the weights it reads the header of each file and both ends of every tensor: other weights differ there, and
    gigabytes need not be read twice.
    """
    digest = hashlib.sha256()
    for name in _TEXT_FILES:
        file = folder / name
        content = file.read_bytes() if file.is_file() else b""
        digest.update(f"{name} {len(content)}\n".encode() + content)
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        _sample_tensors(file, digest)
    return digest.hexdigest()[:32]


def _sample_tensors(path: Path, digest: "hashlib._Hash") -> None:
    with path.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
        data = file.tell()
        digest.update(header)
        for name, tensor in json.loads(header).items():
            if name == "__metadata__":
                continue
            begin, end = tensor["data_offsets"]
            for offset in (begin, max(begin, end - _SAMPLE_BYTES)):
                file.seek(data + offset)
                digest.update(file.read(min(_SAMPLE_BYTES, end - offset)))


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """The ids that end an output. Chat models name them in up to three places, and not always in all."""
    ids: set[int] = set()
    config = text_config(model.config)
    for found in (model.generation_config.eos_token_id, getattr(config, "eos_token_id", None), tokenizer.eos_token_id):
        ids.update(found if isinstance(found, list) else [] if found is None else [found])
    return frozenset(ids)


def _name(folder: Path) -> str:
    marker = folder / MARKER
    if marker.is_file():
        return str(json.loads(marker.read_text())["name"])
    return hub.repository_of(folder.resolve()) or folder.resolve().name


def _cpu_has_bfloat16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
