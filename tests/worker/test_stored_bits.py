"""The bits of a GGUF, kept beside whole weights: when a worker takes them, and that no bit of a result changes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.worker.ggufs import make_converted, refused
from worker_service import own_engine
from worker_service.config import Settings
from worker_service.engine import native
from worker_service.engine.kv import KV
from worker_service.engine.target import InputSequence, Target
from worker_service.model_files import CONFIG, STORED
from worker_service.models import load, load_light


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_converted(tmp_path_factory.mktemp("stored") / "tiny")


@pytest.mark.skipif(native.kernels() is None, reason="only the native decoder takes light models")
def test_in_float32_they_are_taken_unasked_and_change_no_bit(folder: Path, tmp_path: Path) -> None:
    """Of logits, and of what a worker is known by."""
    without = shutil.copytree(folder, tmp_path / "without")
    (without / STORED).unlink()
    small, whole = (load_light(each, torch.float32, 16) for each in (folder, without))
    assert small is not None
    assert whole is not None
    assert {part.packed.bits for part in small.model.modules() if hasattr(part, "packed")} == {4, 8}
    assert not any(hasattr(part, "packed") for part in whole.model.modules())
    assert (small.weights, whole.weights) == ("stored", "whole")
    assert small.fingerprint == whole.fingerprint

    assert torch.equal(logits(small.model), logits(whole.model))


@pytest.mark.skipif(native.kernels() is None, reason="only the native decoder takes light models")
@pytest.mark.parametrize(("tiles", "weights"), [(False, "auto"), (True, "stored"), (False, "stored")])
def test_in_bfloat16_they_are_taken_where_whole_ones_are_not_multiplied_in_tiles_or_if_they_are_asked_for(
    tiles: bool, weights: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "has_tiles", lambda: tiles)
    small, loaded = (
        load_light(folder, torch.bfloat16, 16, weights),
        load(str(folder), "cpu", "bfloat16", weights="stored"),
    )
    assert small is not None
    assert (small.fingerprint == loaded.fingerprint) == (weights == "stored")
    assert torch.equal(logits(small.model), logits(loaded.model))


@pytest.mark.skipif(native.kernels() is None, reason="only the native decoder takes light models")
def test_in_bfloat16_whole_ones_are_multiplied_in_tiles_where_there_are_any(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "has_tiles", lambda: True)
    light = load_light(folder, torch.bfloat16, 16)
    assert light is not None
    assert not any(hasattr(part, "packed") for part in light.model.modules())


@pytest.mark.skipif(native.kernels() is None, reason="few bits are for native kernels")
def test_a_model_that_transformers_reads_has_them_unasked_if_the_native_decoder_computes_it(
    folder: Path, tmp_path: Path
) -> None:
    """Such as Llama 3, whose frequencies are scaled. No bit of a result changes, nor what a worker is known by."""
    scaled = shutil.copytree(folder, tmp_path / "scaled")
    config = json.loads((scaled / CONFIG).read_text())
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config["rope_parameters"] |= scaling | {"original_max_position_embeddings": 64}
    (scaled / CONFIG).write_text(json.dumps(config))
    settings = Settings(model=str(scaled), device="cpu", dtype="float32", block_tokens=16)
    small, whole = own_engine.load_share(settings, None), load(str(scaled), "cpu", "float32")
    assert type(small.model).__name__ == "LlamaForCausalLM"
    assert {part.packed.bits for part in small.model.modules() if hasattr(part, "packed")} == {4, 8}
    assert (small.weights, whole.weights) == ("stored", "whole")
    assert small.fingerprint == whole.fingerprint
    assert torch.equal(logits(small.model), logits(whole.model))


@pytest.mark.skipif(native.kernels() is None, reason="few bits are for native kernels")
def test_a_head_that_is_not_the_embeddings_stays_so_whatever_the_configuration_says(tmp_path: Path) -> None:
    said = make_converted(tmp_path / "said", tied=False)
    config = json.loads((said / CONFIG).read_text())
    (said / CONFIG).write_text(json.dumps(config | {"tie_word_embeddings": True}))
    settings = Settings(model=str(said), device="cpu", dtype="float32", block_tokens=16)
    loaded = own_engine.load_share(settings, None)
    assert loaded.weights == "whole"
    assert torch.equal(logits(loaded.model), logits(load(str(said), "cpu", "float32").model))
    refused(said, "stored", "its head is not its embeddings")


@pytest.mark.skipif(native.kernels() is None, reason="few bits are for native kernels")
def test_a_damaged_file_that_nobody_asked_for_is_left_alone(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    tensors, about = load_file(broken / STORED), safe_open(broken / STORED, "pt").metadata()
    name = "model.layers.0.self_attn.v_proj.weight.scales"
    save_file(tensors | {name: tensors[name][:2]}, broken / STORED, about)
    asked: list[str] = []
    monkeypatch.setattr(own_engine, "check_memory", lambda *_, weights, **__: asked.append(weights))
    settings = Settings(model=str(broken), device="cpu", dtype="float32", block_tokens=16)
    model = own_engine.load_share(settings, None).model
    assert asked == ["stored", "auto"]
    assert not any(hasattr(part, "packed") for part in model.modules())
    assert "weights are taken whole" in caplog.text


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    target, text = Target(model), list(range(3, 43))
    kv = KV(target.new_pool(8, 16))
    kv.extend(len(text))
    return target.forward([InputSequence(kv, 0, text, 0)]).logits


@pytest.mark.skipif(native.kernels() is None, reason="only the native decoder takes light models")
def test_memory_is_checked_for_the_weights_that_are_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(own_engine, "check_memory", lambda *_, weights, **__: asked.append(weights))
    for tiles, dtype in ((True, "float32"), (True, "bfloat16"), (False, "bfloat16")):
        monkeypatch.setattr(native, "has_tiles", lambda tiles=tiles: tiles)
        own_engine.load_share(Settings(model=str(folder), device="cpu", dtype=dtype), None)
    assert asked == ["stored", "auto", "stored"]


@pytest.mark.parametrize("weights", ["auto", "stored"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_some_matrices_may_be_whole(dtype: str, weights: str, folder: Path, tmp_path: Path) -> None:
    """A worker checks what it has loaded against the model's own pass."""
    mixed = shutil.copytree(folder, tmp_path / "mixed")
    tensors, about = load_file(mixed / STORED), safe_open(mixed / STORED, "pt").metadata()
    few = {name: each for name, each in tensors.items() if "layers.0.self_attn.v_proj" not in name}
    save_file(few, mixed / STORED, about)
    own = {"scheduler": "127.0.0.1:1", "kv_tokens": 512, "threads": 1, "drafter": "ngram"}
    settings = Settings(model=str(mixed), device="cpu", dtype=dtype, weights=weights, **own)
    own_engine.build_engine(settings, own_engine.load_share(settings, None), 512)


def test_a_file_of_stored_bits_that_is_cut_short_is_refused(folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / STORED).write_bytes((folder / STORED).read_bytes()[:20_000])
    refused(broken, "stored", f"cannot load .*{STORED}")


def test_a_file_of_stored_bits_of_another_version_is_refused(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    save_file(load_file(folder / STORED), other / STORED, {"version": "7"})
    refused(other, "stored", "is of version 7, not 1: delete .* and pull it again")


def test_stored_bits_of_weights_that_have_changed_are_not_taken(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As by somebody who trains the model further in its folder."""
    changed = shutil.copytree(folder, tmp_path / "changed")
    weights = load_file(changed / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, changed / "model.safetensors", {"format": "pt"})
    refused(changed, "stored", f"{STORED} is not of the weights in .*: delete the file")
    assert load_light(changed, torch.float32, 16) is None
    assert "weights are read by transformers" in caplog.text


@pytest.mark.parametrize("part", ["scales", "minima"])
def test_stored_bits_whose_parts_do_not_fit_are_refused(part: str, folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    tensors, about = load_file(broken / STORED), safe_open(broken / STORED, "pt").metadata()
    name = f"model.layers.1.mlp.gate_proj.weight.{part}"
    save_file(tensors | {name: tensors[name][:32].clone()}, broken / STORED, about)
    refused(broken, "stored", f"{STORED} is damaged: the parts of .*gate_proj.weight do not fit")
