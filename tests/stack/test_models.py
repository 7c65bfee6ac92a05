"""Models in memory: what the service is told of them, and what makes two of them the same."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.tiny_model import EOS, make_tiny_model
from worker_service.identity import fingerprint
from worker_service.model_files import STORED, ModelError
from worker_service.models import choose_device, choose_dtype, load
from worker_service.probes import find_head
from worker_service.pull import resolve


def test_a_loaded_model_knows_its_context_and_its_end(tmp_path: Path) -> None:
    loaded = load(str(make_tiny_model(tmp_path / "tiny", context_tokens=512)), "cpu", "float32")
    assert (loaded.name, loaded.context_tokens, loaded.dtype) == ("tiny", 512, torch.float32)
    assert loaded.eos_ids == {loaded.tokenizer.convert_tokens_to_ids(EOS)}
    assert not loaded.model.training


def test_every_end_of_turn_that_any_file_names_counts(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    eos = load(str(folder), "cpu", "float32").eos_ids
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, *eos]}))
    assert load(str(folder), "cpu", "float32").eos_ids == {7, *eos}


def test_the_fingerprint_is_of_the_content_not_of_the_place(tmp_path: Path) -> None:
    assert fingerprint(make_tiny_model(tmp_path / "a")) == fingerprint(make_tiny_model(tmp_path / "b"))


def test_other_weights_have_another_fingerprint(tmp_path: Path) -> None:
    a, b = make_tiny_model(tmp_path / "a"), make_tiny_model(tmp_path / "b", seed=1)
    assert fingerprint(a) != fingerprint(b)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "config.json"])
def test_another_tokenizer_template_or_config_has_another_fingerprint(name: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    before = fingerprint(folder)
    with (folder / name).open("a") as file:
        file.write(" ")
    assert fingerprint(folder) != before


def test_the_version_of_the_library_that_wrote_a_file_counts_for_nothing(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    found = set()
    for version in ("5.23.0", "6.0.0.dev0"):
        (folder / "config.json").write_text(json.dumps(config | {"transformers_version": version}, indent=2))
        found.add(fingerprint(folder))
    assert len(found) == 1


def test_each_kind_of_weights_has_a_fingerprint_of_its_own(tmp_path: Path) -> None:
    """Workers of one service take over each other's requests, so they must compute alike."""
    folder = make_tiny_model(tmp_path)
    save_file({"a.numbers": torch.zeros(4, 4)}, folder / STORED)
    whole, stored = fingerprint(folder), fingerprint(folder, "stored")
    assert fingerprint(folder, "auto") == whole
    assert len({whole, stored, fingerprint(folder, "int8"), fingerprint(folder, "int4")}) == 4
    save_file({"a.numbers": torch.ones(4, 4)}, folder / STORED)
    assert fingerprint(folder, "stored") != stored
    assert fingerprint(folder) == whole


@pytest.mark.parametrize(("device", "dtype"), [("tpu9", "float32"), ("cpu", "int3")])
def test_an_unknown_device_or_dtype_is_refused(device: str, dtype: str) -> None:
    with pytest.raises(ModelError, match="unknown"):
        choose_dtype(dtype, choose_device(device))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_cuda_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModelError, match="no usable CUDA device"):
        choose_device("cuda")


@pytest.mark.model
def test_the_default_model_ends_turns_as_its_template_writes_them() -> None:
    loaded = load(str(resolve("smollm2-135m")), "cpu", "float32")
    chat = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert loaded.eos_ids == {loaded.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert loaded.context_tokens == 8192


@pytest.mark.model
def test_the_probe_that_comes_with_the_default_model_is_one_of_its_weights() -> None:
    assert find_head("default", load(str(resolve("smollm2-135m")), "cpu", "float32")) is not None
