"""Whether a model can be served on this machine: its architecture, and its memory. Nothing is loaded here."""

import json
import math
from collections.abc import Container
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from worker_service.engine.drafting.eagle import parse_config
from worker_service.engine.few_bits import BITS
from worker_service.engine.output_head import multiplies_to_float32
from worker_service.engine.shape import attention_shapes, kv_values_per_token, layer_configs, text_config
from worker_service.engine.types import Place
from worker_service.engine.warm_up import WARM_UP_TOKENS
from worker_service.light_models import light_config
from worker_service.model_files import CONFIG, STORED, ModelError, TooLittleMemoryError, is_eagle, loaded_files
from worker_service.stored_bits import kept

_GIB = 2**30
_WHOLE = Place()
_LAYERS = {"full_attention", "sliding_attention"}  # the kinds whose past is keys and values of each token
_SAID = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "max_position_embeddings")
_CGROUPS = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_OWN_CGROUP = Path("/proc/self/cgroup")


class DrafterMemory(NamedTuple):
    """What a drafter takes beside the model, at least: bytes of its weights, and of its KV of a token."""

    weights: int = 0
    a_token: int = 0


NO_DRAFTER = DrafterMemory()


def read_config(folder: Path, shares: int = 1, place: Place = _WHOLE) -> Any:
    """The transformers configuration of the model in `folder`.

    Raises ModelError, also for an architecture that the engine cannot serve, or not on `shares` devices together, or
    not over as many stages as `place` says.
    """
    from transformers import AutoConfig  # takes a second

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        model = model_class(config)
    except Exception as error:  # whatever its values make of the library's code
        raise ModelError(f"cannot load {folder}: {summary(error)}") from error
    if problem := _problem(config, model, shares, place):
        raise ModelError(f"{folder}: {model.__name__} {problem}, so it cannot be served")
    return config


def model_class(config: Any) -> Any:
    """The class of transformers that computes text by this configuration, perhaps that of a model that also sees.
    Raises KeyError."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    kinds = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    found = next((kind[type(config)] for kind in kinds if type(config) in kind), None)
    if found is None:
        raise KeyError(f"architecture {config.model_type!r} is no causal LM that transformers supports")
    return found


def summary(error: Exception) -> str:
    """The words of a library's exception, on one line."""
    said = " ".join(str(error.args[0] if isinstance(error, KeyError) and error.args else error).split())
    if isinstance(error, KeyError) and said and " " not in said:  # the key alone
        return f"{said!r} is not known"
    return said or type(error).__name__


def _problem(config: Any, model: Any, shares: int, place: Place) -> str:
    """Why the engine cannot serve this architecture; empty if it can."""
    if getattr(config, "is_encoder_decoder", False):
        return "has an encoder"
    kinds = set(getattr(text_config(config), "layer_types", None) or ())
    if "chunked_attention" in kinds:
        return "attends in chunks"
    if model._is_stateful or not kinds <= _LAYERS:
        return "has layers that remember something else than keys and values"
    if not model._supports_attention_backend:
        return "does not let its attention be replaced"
    first = layer_configs(text_config(config))[0]
    if unsaid := [name for name in _SAID if not isinstance(getattr(first, name, None), int)]:
        return f"has a configuration that does not say its {unsaid[0]}"
    try:
        place.layers(len(attention_shapes(config, shares)))
    except ValueError as error:
        return str(error)
    return ""


def check_kv_tokens(kv_tokens: int, context_tokens: int) -> None:
    """Raises ModelError where not even one short request fits, in the KV memory or in the model's context."""
    for name, tokens in (("kv_tokens", kv_tokens), ("the model's context", context_tokens)):
        if tokens < WARM_UP_TOKENS:
            raise ModelError(f"{name}: {tokens} tokens are too few for a request; {WARM_UP_TOKENS} are the least")


def check_memory(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    kv_tokens: int,
    host_kv_tokens: int = 0,
    shares: int = 1,
    place: Place = _WHOLE,
    weights: str = "auto",
    drafter: DrafterMemory = NO_DRAFTER,
) -> None:
    """Raises TooLittleMemoryError where weights and KV exceed what is free on `device`, or offloaded KV what is free on
    the host; ModelError as read_config does.

    `kv_tokens` and `host_kv_tokens` are for all requests together; `shares`: over how many devices model and KV are
    split, `place`: the stage whose layers are loaded; `weights`: their kind, as in small_weights.py. On a system that
    does not tell what is free nothing is refused.
    """
    whole = shares == place.size == 1
    config = (whole and light_config(folder)) or read_config(folder, shares, place)
    shapes = attention_shapes(config, shares)
    own = place.layers(len(shapes))
    held = _held(folder, config, device, dtype, weights, own, others=place.number == 0) // shares
    a_token = kv_values_per_token(shapes[own.start : own.stop]) * dtype.itemsize
    free = free_bytes(device)
    on_cpu = host_kv_tokens if device.type == "cpu" else 0
    beside = drafter.weights + kv_tokens * drafter.a_token
    if free is not None and held + (kv_tokens + on_cpu) * a_token + beside > free:
        fits = (free - held - on_cpu * a_token - drafter.weights) // (a_token + drafter.a_token)
        advice = f"set kv_tokens to {fits} or less" if fits >= WARM_UP_TOKENS else "it takes more memory or less model"
        raise TooLittleMemoryError(
            f"{folder}: too little memory: {_gib(held)} for weights in "
            f"{str(dtype).removeprefix('torch.') if weights == 'auto' else weights} and "
            f"{_gib((kv_tokens + on_cpu) * a_token)} for KV of {kv_tokens + on_cpu} tokens"
            f"{f' and {_gib(beside)} for its drafter' if beside else ''}, but {device} has "
            f"{_gib(free)} free; {advice}"
        )
    host = free_bytes(torch.device("cpu"))
    if not on_cpu and host is not None and host_kv_tokens * a_token > host:
        raise TooLittleMemoryError(
            f"{folder}: too little memory: {_gib(host_kv_tokens * a_token)} for offloaded KV of {host_kv_tokens} "
            f"tokens, but the host has {_gib(host)} free; set host_kv_tokens to {host // a_token} or less"
        )


def drafter_memory(folder: Path, dtype: torch.dtype) -> DrafterMemory:
    """Of the model or EAGLE-3 head in `folder`. Nothing where there is none that can be read: what is wrong with it is
    said when it is loaded."""
    try:
        raw = json.loads((folder / CONFIG).read_text())
        if is_eagle(folder):
            config: Any = parse_config(raw).layer
        else:
            from transformers import AutoConfig

            config = AutoConfig.from_pretrained(folder, local_files_only=True)
        shapes = attention_shapes(config)
        weights = _weights(folder, range(len(shapes)), others=True)
        return DrafterMemory(weights * dtype.itemsize, kv_values_per_token(shapes) * dtype.itemsize)
    except Exception:  # whatever its values make of the library's code
        return NO_DRAFTER


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"


def _held(
    folder: Path, config: Any, device: torch.device, dtype: torch.dtype, weights: str, own: range, *, others: bool
) -> int:
    """Bytes of memory that weights of this kind take: those of the layers `own`, and if `others` of what is in no
    layer. Raises ModelError."""
    if weights == "stored" and (few := kept(folder)):
        multiplied = {name for name in few if "embed" not in name}  # embeddings may be there twice
        return (folder / STORED).stat().st_size + _weights(folder, own, others=others, but=multiplied) * dtype.itemsize
    count, text = _weights(folder, own, others=others), text_config(config)
    table, tied = text.vocab_size * text.hidden_size, getattr(text, "tie_word_embeddings", False)
    if weights in BITS:  # norms and biases are too small to count; a table that is not tied stays whole
        head = table * BITS["int8"] / 8
        rest = (count - table * (1 if tied else 2)) * BITS[weights] / 8
        return int(head + rest + (0 if tied else table * dtype.itemsize))
    return count * dtype.itemsize + (_head_copy(device, dtype, table, tied) if others else 0)


def _head_copy(device: torch.device, dtype: torch.dtype, table: int, tied: bool) -> int:
    """Bytes that the output head takes beside what the files hold. `table`: how many numbers it has; if it is `tied`,
    the files have one matrix for it and the embeddings."""
    if device.type != "cuda":
        return table * dtype.itemsize if tied else 0  # packed for the kernels
    if dtype == torch.float32 or multiplies_to_float32(device, dtype):
        return 0
    return table * (4 if tied else 4 - dtype.itemsize)  # in float32, and the other one goes


def _weights(folder: Path, layers: range, *, others: bool, but: Container[str] = ()) -> int:
    """How many numbers the model's files hold for these layers, and for what is in no layer if `others`, without the
    weights named `but`. Raises ModelError if one of them is no safetensors file."""

    def counts(name: str) -> bool:
        if name in but:
            return False
        number = next((int(part) for part in name.split(".") if part.isdecimal()), None)
        return others if number is None else number in layers

    count = 0
    for path in loaded_files(folder):
        try:
            with safe_open(path, "pt") as file:
                names = filter(counts, file.keys())
                count += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot load {folder}: {path.name} is no safetensors file: {error}") from error
    return count


def free_bytes(device: torch.device) -> int | None:
    """Bytes of memory that can still be taken on this device; None: the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = [free for free in (_meminfo_free(), *_cgroup_free()) if free is not None]
    return min(found, default=None)


def _meminfo_free() -> int | None:
    if not _MEMINFO.exists():
        return None
    lines = (line.split() for line in _MEMINFO.read_text().splitlines())
    return next((int(line[1]) * 1024 for line in lines if line[0] == "MemAvailable:"), None)


def _cgroup_free() -> list[int]:
    """Bytes that each control group (version 2) around this process leaves to it, such as a container's limit."""
    if not _OWN_CGROUP.exists():
        return []
    own = next((line[3:] for line in _OWN_CGROUP.read_text().splitlines() if line.startswith("0::")), "/")
    group = _CGROUPS / own.strip("/")
    found = []
    for folder in (group, *group.parents):
        limit = folder / "memory.max"
        if limit.is_file() and (most := limit.read_text().strip()) != "max":
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            # The system takes back pages of files that are not in use.
            used = int((folder / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
            found.append(max(int(most) - used, 0))
        if folder == _CGROUPS:
            break
    return found
