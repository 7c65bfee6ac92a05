"""Models in memory: weights, tokenizer, and what the service must know of them. They are fetched by pull.py.

The transformers library is imported by whoever needs it: that takes a worker 2 to 3 of its 7 CPU seconds to ready.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from worker_service.capacity import model_class, read_config, summary
from worker_service.engine.cut import cut
from worker_service.engine.decoder import NativeDecoder
from worker_service.engine.llama import Llama
from worker_service.engine.packed import PackedLinear
from worker_service.engine.parallel import Ranks
from worker_service.engine.shape import text_config
from worker_service.engine.types import Place
from worker_service.identity import fingerprint, model_name
from worker_service.light_models import eos_ids, few_bits_pay, light_config, light_tokenizer, light_weights
from worker_service.model_files import ModelError, check_directory, end_ids
from worker_service.small_weights import check_weights_kind, load_small
from worker_service.stored_bits import kept

_log = logging.getLogger(__name__)
_ALONE, _WHOLE = Ranks(), Place()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal LM in eval mode on `device`, and its fast tokenizer (`.backend_tokenizer`, `.chat_template`)."""

    model: Any
    tokenizer: Any
    name: str
    fingerprint: str  # equal where weights and their kind, tokenizer and chat template are equal, whatever dtype
    context_tokens: int  # prompt and output together
    eos_ids: frozenset[int]
    device: torch.device
    dtype: torch.dtype
    refused: Mapping[str, str] = field(default_factory=dict)  # our engine serves all that the interface has
    caveats: Sequence[str] = ()
    weights: str = "whole"  # or a kind of few bits (small_weights.py)


def load(
    path: str,
    device: str = "auto",
    dtype: str = "auto",
    ranks: Ranks = _ALONE,
    place: Place = _WHOLE,
    weights: str = "auto",
) -> LoadedModel:
    """Load a Hugging Face directory. `device`: auto, cpu or cuda; `dtype`: auto, float32 or bfloat16.

    `ranks`: this process's place among those that share the model. It loads its share as transformers' tensor-parallel
    plan splits the model, but embeddings and output head whole. `place`: the stage whose layers are loaded. `weights`:
    auto, or a kind of few bits (small_weights.py), of a whole model in one process. Raises ModelError, also for a
    device that is not there.
    """
    folder = Path(path)
    check_directory(folder)
    where = choose_device(device, ranks)
    number = choose_dtype(dtype, where)
    config = read_config(folder, ranks.size, place)
    if weights != "auto":
        check_weights_kind(weights, folder, config, where, ranks.size * place.size)
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    what = f"the tokenizer of {folder}"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        what = str(folder)
        if weights == "auto":
            model = _whole(folder, config, number, ranks, place).to(where).eval()
        else:
            model = load_small(folder, config, weights, number).eval()
    except (ModelError, torch.OutOfMemoryError):  # of memory there may be more another time
        raise
    except Exception as error:  # of transformers and what reads weights for it, such as a quantiser that is not here
        packed = getattr(config, "quantization_config", None)
        quantised = f" (weights quantised by {_method(packed)})" if packed else ""
        said = summary(error)
        if "ignore_mismatched_sizes" in said:
            said = "its weights have other shapes than its config.json says"
        raise ModelError(f"cannot load {what}{quantised}: {said}") from error
    if not tokenizer.is_fast:
        raise ModelError(f"{folder}: the tokenizer has no fast form (tokenizer.json)")
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=model_name(folder),
        fingerprint=fingerprint(folder, weights),
        context_tokens=int(text_config(model.config).max_position_embeddings),
        eos_ids=_eos_ids(model, tokenizer),
        device=where,
        dtype=number,
        weights="whole" if weights == "auto" else weights,
    )


def load_light(folder: Path, dtype: torch.dtype, block_tokens: int, weights: str = "auto") -> LoadedModel | None:
    """A plain model that the native decoder computes whole, on the CPU, read without transformers; None: `load` it.
    `weights`: auto or stored."""
    config = light_config(folder)
    if config is None or not NativeDecoder.takes(config, block_tokens, dtype):
        return None
    if (tokenizer := light_tokenizer(folder)) is None:
        return None
    if (model := light_weights(folder, config, dtype, weights)) is None:
        return None
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=model_name(folder),
        fingerprint=fingerprint(folder, weights),
        context_tokens=config.max_position_embeddings,
        eos_ids=eos_ids(folder, config, tokenizer),
        device=model.device,
        dtype=dtype,
        weights="stored" if any(isinstance(part, PackedLinear) for part in model.modules()) else "whole",
    )


def load_alone(folder: Path, dtype: torch.dtype, block_tokens: int, weights: str, taken: str) -> LoadedModel:
    """As `load`, on the CPU, for a worker that shares the model with nobody. `weights`: auto or stored; `taken`: what
    weights_taken makes of it. The fingerprint does not tell that, for workers with either may serve together."""
    if light := load_light(folder, dtype, block_tokens, weights):
        return light
    loaded = load(str(folder), "cpu", str(dtype).removeprefix("torch."), weights=taken)
    return loaded if taken == weights else replace(loaded, fingerprint=fingerprint(folder, weights))


def weights_taken(folder: Path, dtype: torch.dtype, block_tokens: int, weights: str) -> str:
    """The kind of weights for `load_alone`: where it says auto, stored if there are such and that is faster. In float32
    it changes no bit of what the native decoder computes. Raises ModelError."""
    if weights != "auto" or not few_bits_pay(dtype):
        return weights
    try:
        few = kept(folder)
    except ModelError as error:
        _log.warning("weights are taken whole: %s", error)
        return weights
    light = light_config(folder)
    if not few or not NativeDecoder.takes(light or read_config(folder), block_tokens, dtype):
        return weights
    # Of a light model's whole matrices none is rounded to bfloat16.
    mixed = light and dtype != torch.float32 and not Llama(light).matrices <= few.keys()
    return weights if mixed else "stored"


def _whole(folder: Path, config: Any, dtype: torch.dtype, ranks: Ranks, place: Place) -> Any:
    kind = model_class(config) if place.size == 1 else cut(model_class(config), place)
    plan = {"distributed_config": _shares(folder, config, ranks.size)} if ranks.size > 1 else {}
    model, report = kind.from_pretrained(folder, dtype=dtype, local_files_only=True, output_loading_info=True, **plan)
    if missing := sorted(report["missing_keys"]):  # transformers would fill them at random, on every worker anew
        raise ModelError(f"{folder}: {len(missing)} weights are not in its files; the first is {missing[0]}")
    return model


def _method(quantisation: Any) -> str:
    """The name of a quantisation in a configuration, which is a table or an object."""
    given = quantisation if isinstance(quantisation, dict) else vars(quantisation)
    return str(getattr(given.get("quant_method"), "value", given.get("quant_method")))


def _shares(folder: Path, config: Any, ranks: int) -> Any:
    """How transformers splits this model over `ranks` devices. Raises ModelError if it cannot."""
    from transformers.distributed import DistributedConfig

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


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Raises ModelError."""
    config = text_config(model.config)
    named = model.generation_config.eos_token_id, getattr(config, "eos_token_id", None), tokenizer.eos_token_id
    return end_ids(named, int(config.vocab_size))


def _cpu_has_bfloat16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
