"""A directory's model: its name, and the fingerprint that all workers of a service must agree on. It is read
from the files alone: no library of models, and no torch."""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from worker_service import hub
from worker_service.model_files import MARKER, STORED, check_weights, loaded_files

_TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_SAMPLE_BYTES = 4096
_VERSION = re.compile(rb'\s*"transformers_version": *"[^"]*",?')  # of who wrote a file: it decides nothing


class Described(Protocol):
    """A loaded model as others must know it, whichever engine runs it."""

    @property
    def tokenizer(self) -> Any:
        """A fast tokenizer of transformers (`.backend_tokenizer`, `.chat_template`)."""

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str:
        """Equal where weights and their kind, tokenizer and chat template are equal, whatever engine and dtype."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def refused(self) -> Mapping[str, str]:
        """Fields of a request that the engine cannot serve, and why."""

    @property
    def caveats(self) -> Sequence[str]:
        """The promises of the interface that the engine does not keep: a sentence each."""


def fingerprint(folder: Path, weights: str = "auto") -> str:
    """Hex digest of what decides the output: every tokenizer and config file, the weights, and of which kind they are
    in memory (small_weights.py), unless that is left to the worker.

    Of the weights it reads the header of each file and both ends of every tensor: other weights differ there, and
    gigabytes need not be read twice.
    """
    digest = hashlib.sha256()
    for name in _TEXT_FILES:
        file = folder / name
        content = _VERSION.sub(b"", file.read_bytes()) if file.is_file() else b""
        digest.update(f"{name} {len(content)}\n".encode() + content)
    _sample_files(folder.glob("*.safetensors"), digest)
    if weights != "auto":
        digest.update(f"weights {weights}\n".encode())
    if weights == "stored" and (folder / STORED).is_file():
        _sample_tensors(folder / STORED, digest)
    return digest.hexdigest()[:32]


def weights_digest(folder: Path) -> str:
    """Hex digest of the weights that are loaded from the folder, as far as `fingerprint` reads them."""
    digest = hashlib.sha256()
    _sample_files(loaded_files(folder), digest)
    return digest.hexdigest()


def _sample_files(files: Iterable[Path], digest: "hashlib._Hash") -> None:
    for file in sorted(files):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        _sample_tensors(file, digest)


def _sample_tensors(path: Path, digest: "hashlib._Hash") -> None:
    check_weights(path)
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


def model_name(folder: Path) -> str:
    """As people call it: by the marker of `laps-sd pull`, the hub, or the folder."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return str(json.loads((folder / MARKER).read_text())["name"])
    return hub.repository_of(folder.resolve()) or folder.resolve().name


def read_ahead(folder: Path) -> None:
    """Have the system read the weights from the disk, while libraries are imported. Returns at once."""
    if hasattr(os, "posix_fadvise"):
        for file in (*folder.glob(STORED), *folder.glob("*.safetensors")):
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
