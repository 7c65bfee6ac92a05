"""Writes a file of weights. What they are of is not known here."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file


def save_weights(weights: Mapping[str, torch.Tensor], file: Path) -> None:
    """As safetensors, which others may read: the library's own files are private."""
    save_file({name: weight.contiguous() for name, weight in weights.items()}, file)
    file.chmod(0o644)
