"""A model as a directory: what has to be in it, and where directories of models are kept. Nothing is fetched here, and
no model is read."""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

CACHE_VARIABLE = "LAPS_SD_CACHE"
MARKER = "laps-sd.json"  # in each converted model: {"name", "sha256" of its GGUF}; written last
CONFIG, TOKENIZER, ADAPTER = "config.json", "tokenizer.json", "adapter_config.json"
STORED = "model.stored"  # the weights of a converted GGUF as it had them: stored_bits.py
WEIGHTS, SHARDS_INDEX = "model.safetensors", "model.safetensors.index.json"
_KNOWN_KINDS = ("llama", "mistral", "qwen2", "qwen3")  # of causal LMs; transformers is asked about any other


class ModelError(Exception):
    """There is no such model, or it cannot be used; the message says what to do."""


class OutOfReachError(ModelError):
    """A network, the other end of it or a disk failed; another time the model may be had."""


class TooLittleMemoryError(ModelError):
    """Weights and KV exceed what is free now; another time they may fit."""


def default_cache() -> Path:
    from platformdirs import user_cache_dir  # not on a machine that has the engine's own libraries alone

    return Path(os.environ.get(CACHE_VARIABLE) or user_cache_dir("laps-sd"))


@contextmanager
def locked(path: Path) -> Iterator[BinaryIO]:
    """The file of that name, to append to, which no other process has as long. Whoever had it before may have given it
    another name, or removed it: then it is opened anew."""
    while True:
        with path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(file, path):
                yield file
                return


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def at_home(path: str) -> Path:
    """With ~ for a home directory. Raises ModelError if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ModelError(f"{path}: {error}") from error


def check_directory(path: Path) -> None:
    """Raises ModelError unless `path` holds a causal LM that transformers knows, its weights and a fast tokenizer."""
    files = _weights(path)
    _check_kind(_kind(path), str(path))
    for file in files:
        check_weights(file)


def check_files(path: Path) -> None:
    """As check_directory, but for the architecture: no library is loaded, so a wrong folder is told at once."""
    for file in _weights(path):
        check_weights(file)


def _weights(path: Path) -> list[Path]:
    """The files of weights. Raises ModelError unless `path` holds a config, a fast tokenizer and weights."""
    _kind(path)
    if not (path / TOKENIZER).is_file():
        raise ModelError(f"{path} has no tokenizer.json; save the model's fast tokenizer there (save_pretrained)")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{path} has no *.safetensors; save the model's weights there (save_pretrained)")
    return files


def end_ids(named: Iterable[object], vocab_size: int) -> frozenset[int]:
    """The ids that end an output. Chat models name them in up to three places, and not always in all; each place is
    None, an id or a list of them. An id that has no logit is never drawn, so it is left out. Raises ModelError."""
    ids: set[int] = set()
    for place in named:
        for id in place if isinstance(place, list) else [] if place is None else [place]:
            if isinstance(id, bool) or not isinstance(id, int):
                raise ModelError(f"eos_token_id must be a token id or a list of them, not {id!r:.40}")
            if 0 <= id < vocab_size:
                ids.add(id)
    return frozenset(ids)


def check_weights(file: Path) -> None:
    """Raises ModelError unless the file is as long as its header says, which tells where each tensor lies."""
    if problem := _problem(file):
        raise ModelError(f"cannot load {file}: it {problem}")


def _problem(file: Path) -> str:
    """Of a safetensors file; empty if there is none."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            size = os.fstat(opened.fileno()).st_size
            if not 2 <= length <= size - 8:
                return "is no safetensors file"
            header = json.loads(opened.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        if 8 + length + max(ends, default=0) != size:
            return "is broken off or longer than its header says; fetch it again"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return "is no safetensors file"
    return ""


def is_eagle(path: Path) -> bool:
    """Whether directory `path` claims to be an EAGLE draft head, which comes without a tokenizer."""
    try:
        config = json.loads((path / CONFIG).read_text())
        names = [*(config.get("architectures") or ()), config.get("speculators_model_type")]
        return "draft_vocab_size" in config or any("eagle" in str(name).lower() for name in names)
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def check_config(path: Path, name: str) -> None:
    """Raises ModelError unless the config in directory `path` is that of a causal LM. `name`: of the model, for
    people."""
    _check_kind(_kind(path), name)


def kv_heads(path: Path) -> int | None:
    """Heads of keys and values, as the config in directory `path` has them; None: it does not say."""
    return _said(path, "num_key_value_heads", "num_attention_heads")


def layers(path: Path) -> int | None:
    """As `kv_heads`, of layers."""
    return _said(path, "num_hidden_layers")


def _said(path: Path, *names: str) -> int | None:
    """The first of these numbers that the config has."""
    try:
        config = json.loads((path / CONFIG).read_text())
        found = next((config[name] for name in names if config.get(name)), None)
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, int) and found > 0 else None


def is_complete(path: Path) -> bool:
    """Whether config, tokenizer and all weights are in directory `path`, by their names alone."""
    if not all((path / name).is_file() for name in (CONFIG, TOKENIZER)):
        return False
    return (path / WEIGHTS).is_file() or all((path / shard).is_file() for shard in shards(path) or [SHARDS_INDEX])


def shards(path: Path) -> list[str]:
    """The names of the files that the weights are spread over; empty if they are in one file."""
    try:
        return sorted(set(json.loads((path / SHARDS_INDEX).read_text())["weight_map"].values()))
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ModelError(f"{path / SHARDS_INDEX} does not say which files hold the weights") from None


def loaded_files(path: Path) -> list[Path]:
    """Those that weights are loaded from. Others may lie beside them, with the same weights under other names. Raises
    ModelError."""
    names = [WEIGHTS] if (path / WEIGHTS).is_file() else shards(path)
    return [path / name for name in names] or sorted(path.glob("*.safetensors"))


def _kind(path: Path) -> object:
    """The architecture that the model's config names. Raises ModelError, also for an adapter: libraries would serve the
    model beneath it alone."""
    if (path / ADAPTER).is_file():
        raise ModelError(
            f"{path} is a LoRA adapter, which cannot be served: merge it into its model (merge_and_unload of peft), "
            "save that, and name its folder"
        )
    try:
        config = json.loads((path / CONFIG).read_text())
    except FileNotFoundError:
        raise ModelError(f"{path} has no config.json: it is no Hugging Face model directory") from None
    except ValueError as error:
        raise ModelError(f"{path / CONFIG} is no JSON: {error}") from None
    return config.get("model_type") if isinstance(config, dict) else None


def _check_kind(kind: object, name: str) -> None:
    if kind in _KNOWN_KINDS:  # the import below takes a second
        return
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LMS
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as SEEING

    if kind not in CAUSAL_LMS and kind not in SEEING:
        raise ModelError(f"{name}: architecture {kind!r} is no causal LM that transformers supports")
