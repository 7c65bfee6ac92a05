"""Model files that are damaged or not whole: refused with a sentence, never served."""

import json
from pathlib import Path

import pytest

from tests.tiny_model import make_tiny_model
from worker_service.models import load
from worker_service.pull import ModelError


def with_config(folder: Path, **changes: int) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def test_weights_that_are_cut_short_are_refused(tmp_path: Path) -> None:
    file = make_tiny_model(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ModelError, match="cannot load"):
        load(str(tmp_path), "cpu", "float32")


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    folder = with_config(make_tiny_model(tmp_path), intermediate_size=64)
    with pytest.raises(ModelError, match="cannot load"):
        load(str(folder), "cpu", "float32")


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    folder = with_config(make_tiny_model(tmp_path), num_hidden_layers=3)
    with pytest.raises(ModelError, match=r"weights are not in its files; the first is model\.layers\.2\."):
        load(str(folder), "cpu", "float32")
