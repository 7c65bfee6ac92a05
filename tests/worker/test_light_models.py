"""Plain models of the Llama family are read without the transformers library, as it reads them; others by it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_model import make_tiny_model
from tests.worker.eagles import make_eagle
from worker_service.engine import native
from worker_service.light_models import light_config, light_tokenizer, light_weights
from worker_service.model_files import ModelError
from worker_service.models import load, load_light

pytestmark = pytest.mark.skipif(native.kernels() is None, reason="only the native decoder takes light models")
BLOCK_TOKENS, EOS = 64, "eos_token_id"

LOADED = """
import sys
from pathlib import Path
import torch
from worker_service.config import Settings
from worker_service.own_engine import build_engine, load_share
model, drafter = sys.argv[1:]
settings = Settings(
    model=model, drafter=drafter, scheduler="127.0.0.1:1", kv_tokens=512, device="cpu", threads=1
)
build_engine(settings, load_share(settings, None), 512)
print(*sorted({"transformers", "scipy", "sympy", "torch._dynamo"} & sys.modules.keys()))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "tiny")


def change(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("drafter", ["ngram", "an EAGLE-3 head"])
def test_a_worker_that_loads_such_a_model_and_checks_its_engine_imports_no_library_of_models(
    drafter: str, folder: Path, tmp_path: Path
) -> None:
    if drafter != "ngram":
        drafter = str(make_eagle(tmp_path / "head", load(str(folder), "cpu", "float32").model))
    command = [sys.executable, "-c", LOADED, str(folder), drafter]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


@pytest.mark.parametrize("made", [{}, {"tied": False}, {"shard": "100KB"}, {"tied": False, "shard": "100KB"}], ids=str)
def test_what_is_read_is_what_transformers_reads(made: dict[str, Any], tmp_path: Path) -> None:
    """Of heads that are the embeddings or not, of weights in one file or several."""
    folder = make_tiny_model(tmp_path / "tiny", **made)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == ("shard" in made)
    light, whole = load_light(folder, torch.float32, BLOCK_TOKENS), load(str(folder), "cpu", "float32")
    assert light is not None
    same = ("name", "fingerprint", "context_tokens", "eos_ids", "device", "dtype")
    assert [getattr(light, name) for name in same] == [getattr(whole, name) for name in same]
    ids = torch.arange(40)[None]
    with torch.inference_mode():
        logits = [each.model(ids, use_cache=False).logits for each in (light, whole)]
    assert torch.equal(*logits)


def test_its_tokenizer_is_that_of_transformers(folder: Path) -> None:
    light, whole = light_tokenizer(folder), load(str(folder), "cpu", "float32").tokenizer
    assert light is not None
    assert light.backend_tokenizer.to_str() == whole.backend_tokenizer.to_str()
    same = ("special_tokens_map", "eos_token_id", "chat_template")
    assert [getattr(light, name) for name in same] == [getattr(whole, name) for name in same]
    assert light.get_vocab() == whole.get_vocab()


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "qwen3"},
        {"attention_bias": True},
        {"hidden_act": "gelu"},
        {"sliding_window": 64},
        {"quantization_config": {"bits": 4}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}},
        {"num_key_value_heads": 3},
        {"hidden_size": "64"},
        {"rms_norm_eps": None},
        {"head_dim": 16.0},
    ],
)
def test_what_is_not_known_of_a_configuration_is_left_to_transformers(folder: Path, fields: dict[str, object]) -> None:
    assert light_config(folder) is not None
    change(folder / "config.json", **fields)
    assert light_config(folder) is None


def test_so_is_a_tokenizer_of_which_more_is_said(folder: Path) -> None:
    change(folder / "tokenizer_config.json", add_prefix_space=True)
    assert light_tokenizer(folder) is None
    assert load_light(folder, torch.float32, BLOCK_TOKENS) is None


def test_so_are_special_tokens_that_it_would_not_know_as_such(folder: Path) -> None:
    """transformers adds those that the file has among ordinary ones."""
    assert light_tokenizer(folder) is not None
    change(folder / "tokenizer.json", added_tokens=[])
    assert light_tokenizer(folder) is None


def test_a_configuration_without_an_end_of_text_has_that_of_transformers(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({name: value for name, value in json.loads(file.read_text()).items() if name != EOS}))
    light, whole = load_light(folder, torch.float32, BLOCK_TOKENS), load(str(folder), "cpu", "float32")
    assert light is not None
    assert light.eos_ids == whole.eos_ids


@pytest.mark.parametrize("changed", ["a head beside the embeddings that it is said to be", "matrices of two types"])
def test_so_are_weights_that_its_own_pass_would_take_otherwise(folder: Path, changed: str) -> None:
    config = light_config(folder)
    assert config is not None
    assert config.tie_word_embeddings
    weights = load_file(folder / "model.safetensors")
    if changed == "matrices of two types":
        name = next(name for name in weights if name.endswith("up_proj.weight"))
        weights[name] = weights[name].bfloat16()
    else:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert light_weights(folder, config, torch.float32) is None


def test_weights_that_are_not_there_are_named_by_who_loads_whole_models(folder: Path) -> None:
    change(folder / "config.json", num_hidden_layers=3)
    assert load_light(folder, torch.float32, BLOCK_TOKENS) is None
    with pytest.raises(ModelError, match=r"the first is model\.layers\.2"):
        load(str(folder), "cpu", "float32")


def test_layers_that_the_native_decoder_does_not_take_are_left_to_transformers(folder: Path) -> None:
    assert load_light(folder, torch.float32, block_tokens=24) is None
