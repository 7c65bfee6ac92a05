"""Models whose weights stay small: their text is that of transformers with the weights that the bits stand for."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PhiConfig

from tests.tiny_model import make_tiny_model
from tests.worker.ggufs import GGUF, make_converted, refused, write_gguf
from tests.worker.harness import Driver, greedy_differences
from worker_service import capacity, own_engine
from worker_service.config import Settings
from worker_service.engine import native
from worker_service.engine.drafting.ngram import NgramDrafter
from worker_service.engine.engine import Engine
from worker_service.engine.kv import KV
from worker_service.engine.parallel import Ranks
from worker_service.engine.target import InputSequence, Target
from worker_service.engine.types import Limits, Place, Run
from worker_service.identity import fingerprint
from worker_service.model_files import STORED, ModelError
from worker_service.models import load
from worker_service.pull import convert

PROMPTS = ("The quick brown fox", "Once upon a time there was a queue. In the queue")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_converted(tmp_path_factory.mktemp("small") / "tiny")


def whole(model: torch.nn.Module, folder: Path) -> torch.nn.Module:
    """transformers' own model, with the weights that those of `model` stand for."""
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    weights = {f"{name}.weight": part.weight for name, part in model.named_modules() if hasattr(part, "packed")}
    reference.load_state_dict(weights, strict=False)
    return reference


def check_text(
    folder: Path, weights: str, reference: torch.nn.Module | None = None, native_decoder: bool = True
) -> None:
    loaded = load(str(folder), "cpu", "float32", weights=weights)
    reference = reference or whole(loaded.model, folder)
    engine = Engine(
        loaded.model,
        loaded.tokenizer,
        eos_ids=frozenset(),
        context_tokens=256,
        blocks=64,
        block_tokens=16,
        drafter=NgramDrafter(),
    )
    assert (engine.target._decoder is not None) == native_decoder
    driver = Driver(engine)
    prompts = {str(i): list(loaded.tokenizer(text).input_ids) for i, text in enumerate(PROMPTS)}
    for name, prompt in prompts.items():
        driver.admit(name, prompt, Limits(max_tokens=40))
    while live := driver.live:
        driver.step([Run(name, 3, 8) for name in live], slots=2)
    for name, prompt in prompts.items():
        assert len(driver.outputs[name]) == 40
        assert greedy_differences(reference, prompt, driver.outputs[name]) == []


def test_a_ggufs_own_weights_give_the_text_that_transformers_makes_of_it(folder: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32).eval()
    check_text(folder, "stored", reference)


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose head is not its embeddings, in several files."""
    folder = make_tiny_model(tmp_path_factory.mktemp("spread") / "tiny", tied=False, shard="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["folder", "spread"])
def test_quantised_weights_give_the_text_of_the_weights_that_they_stand_for(
    kind: str, weights: str, request: pytest.FixtureRequest
) -> None:
    check_text(request.getfixturevalue(kind), weights)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["folder", "spread"])
def test_in_bfloat16_logits_are_those_of_the_weights_that_they_stand_for(
    kind: str, weights: str, request: pytest.FixtureRequest
) -> None:
    """Up to the rounding of activations, which is as large where transformers computes in bfloat16."""
    path = request.getfixturevalue(kind)
    loaded, text = load(str(path), "cpu", "bfloat16", weights=weights).model, list(range(3, 43))
    reference, target = whole(loaded, path), Target(loaded)
    kv = KV(target.new_pool(8, 16))
    kv.extend(len(text))
    with torch.inference_mode():
        found = target.forward([InputSequence(kv, 0, text, 0)]).logits
        expected = reference(torch.tensor([text])).logits[0]
        rounded = reference.bfloat16()(torch.tensor([text])).logits[0].float()
    assert target._decoder is not None
    assert (found - expected).norm() < 1.5 * (rounded - expected).norm()
    assert (found - expected).norm() < 0.03 * expected.norm()


def test_a_head_that_is_not_the_embeddings_has_weights_of_its_own(spread: Path) -> None:
    model = load(str(spread), "cpu", "float32", weights="int4").model
    own = AutoModelForCausalLM.from_pretrained(spread, dtype=torch.float32)
    assert torch.equal(model.get_input_embeddings().weight, own.get_input_embeddings().weight)
    head = model.get_output_embeddings()
    torch.testing.assert_close(head.weight, own.get_output_embeddings().weight, atol=0.01, rtol=0.01)
    assert head.packed.bits == 8


def test_a_family_without_a_native_decoder_is_served_too(folder: Path, tmp_path: Path) -> None:
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = PhiConfig(vocab_size=size, initializer_range=0.1, max_position_embeddings=256, pad_token_id=0, **small)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    check_text(tmp_path, "int8", native_decoder=False)


def test_a_prompts_logits_do_not_depend_on_the_batch(folder: Path) -> None:
    """Bit for bit, in bfloat16 too."""
    target = Target(load(str(folder), "cpu", "bfloat16", weights="stored").model)
    pool, text = target.new_pool(64, 16), list(range(3, 43))

    @torch.inference_mode()
    def logits(width: int, others: int) -> torch.Tensor:
        caches, rows = [KV(pool) for _ in range(others + 1)], []
        for begin in range(0, len(text), width):
            for kv in caches:
                kv.extend(width)
            parts = [text[begin : begin + width], *[[i] * width for i in range(others)]]
            passes = [InputSequence(kv, begin, part, 0) for kv, part in zip(caches, parts, strict=True)]
            rows.append(target.forward(passes)[0][:width].clone())
        for kv in caches:
            kv.release()
        return torch.cat(rows)

    alone = logits(1, 0)
    for width, others in ((1, 7), (5, 0), (8, 3), (40, 1)):
        assert torch.equal(logits(width, others), alone)


def test_without_a_gguf_there_is_nothing_stored(tmp_path: Path) -> None:
    refused(make_tiny_model(tmp_path), "stored", f"holds no {STORED}")


def test_without_native_kernels_weights_are_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "kernels", lambda: None)
    refused(folder, "int8", "here: no kernels; a warning in the log says why")


def test_weights_that_are_quantised_already_are_left_so(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    refused(folder, "int8", "quantised already; leave it at auto")


def test_a_gguf_that_lacks_weights_is_not_converted(tmp_path: Path) -> None:
    """The library would make them up, on every machine anew."""
    (tmp_path / "made").mkdir()
    folder = make_tiny_model(tmp_path / "tiny")
    write_gguf(folder, without="blk.1.ffn_up")
    with pytest.raises(ModelError, match="1 weights are not in it"):
        convert(folder / GGUF, tmp_path / "made")


def test_weights_of_another_shape_are_refused(folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    config = json.loads((folder / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    refused(broken, "int8", r"has shape \[64, 128\], not \[64, 96\]")


def test_a_weight_that_is_no_number_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers[0].mlp.up_proj.weight.data[3, 5] = float("nan")
    model.save_pretrained(folder)
    refused(folder, "int4", r"up_proj\.weight: a weight is not finite")


def test_processes_that_share_a_model_have_whole_weights(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"weights int8: only one process on a CPU .* here: 2 processes"):
        load(str(folder), "cpu", "float32", Ranks(0, 2), weights="int8")
    with pytest.raises(ModelError, match="here: 2 processes"):
        load(str(folder), "cpu", "float32", place=Place(0, 2), weights="int8")


def test_states_between_layers_are_told_too(folder: Path) -> None:
    """As transformers has them, with the weights that the bits stand for."""
    model = load(str(folder), "cpu", "float32", weights="int4").model
    reference, target, text = whole(model, folder), Target(model), list(range(3, 20))
    kv = KV(target.new_pool(8, 16))
    kv.extend(len(text))
    target.expose([0, 1])
    with torch.inference_mode():
        states = target.forward([InputSequence(kv, 0, text, 0)]).states
        expected = reference(torch.tensor([text]), output_hidden_states=True).hidden_states
    assert states is not None
    torch.testing.assert_close(states, torch.cat(expected[:2], -1)[0], rtol=1e-4, atol=1e-4)


def test_the_fingerprint_is_of_these_weights(folder: Path) -> None:
    assert load(str(folder), "cpu", "float32", weights="int8").fingerprint == fingerprint(folder, "int8")


def held(folder: Path, config: Any, dtype: torch.dtype, weights: str) -> int:
    layers = range(config.num_hidden_layers)
    return capacity._held(folder, config, torch.device("cpu"), dtype, weights, layers, others=True)


@pytest.mark.parametrize(
    ("kind", "weights"),
    [("folder", "int8"), ("folder", "int4"), ("folder", "stored"), ("spread", "int8"), ("spread", "int4")],
)
def test_the_bytes_that_are_packed_are_those_that_are_counted(
    kind: str, weights: str, request: pytest.FixtureRequest
) -> None:
    """And those of embeddings that are not the head, which stay whole."""
    folder = request.getfixturevalue(kind)
    settings = Settings(model=str(folder), device="cpu", dtype="float32", weights=weights)
    model = own_engine.load_share(settings, None).model
    packed = {id(part.packed): part.packed.nbytes for part in model.modules() if hasattr(part, "packed")}
    table = model.get_input_embeddings().weight.nbytes if kind == "spread" or weights == "stored" else 0
    counted = held(folder, model.config, torch.float32, weights)
    assert sum(packed.values()) + table == pytest.approx(counted, rel=0.1)
    assert counted - table < held(folder, model.config, torch.bfloat16, "auto") / 1.8
