"""Models whose weights stay small: their text is that of transformers with the weights that the bits stand for."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PhiConfig

from tests.tiny_model import make_tiny_model
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
from worker_service.models import load, load_light
from worker_service.pull import convert
from worker_service.stored_bits import keep

GGUF = "model.gguf"
PROMPTS = ("The quick brown fox", "Once upon a time there was a queue. In the queue")
# Of each tensor's last word; what is not here is whole. Several kinds meet in one product.
KINDS = {"attn_q": "Q4_1", "attn_k": "Q4_0", "attn_v": "Q8_0", "attn_output": "Q5_0"}
KINDS |= {"ffn_gate": "Q4_1", "ffn_up": "Q5_1", "ffn_down": "Q4_0", "token_embd": "Q8_0"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of a GGUF with weights of several kinds, as it is converted."""
    folder = make_tiny_model(tmp_path_factory.mktemp("small") / "tiny")
    write_gguf(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder)
    keep(folder / GGUF, model, folder)
    return folder


def write_gguf(folder: Path, without: str = "") -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config, names = model.config, gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    writer = gguf.GGUFWriter(folder / GGUF, "llama")
    writer.add_block_count(2)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    for name, weight in model.named_parameters():
        stored = names.get_name(name.removesuffix(".weight"))
        assert stored is not None
        values, heads = weight.detach().numpy(), {"attn_q": 4, "attn_k": 2}.get(stored.split(".")[-1])
        if heads:  # llama.cpp turns neighbours where transformers turns halves
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        kind = KINDS.get(stored.split(".")[-1])
        if stored == without:
            continue
        if kind is None:
            writer.add_tensor(f"{stored}.weight", np.ascontiguousarray(values))
        else:
            number = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(f"{stored}.weight", quantize(np.ascontiguousarray(values), number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    target, text = Target(model), list(range(3, 43))
    kv = KV(target.new_pool(8, 16))
    kv.extend(len(text))
    return target.forward([InputSequence(kv, 0, text, 0)]).logits


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


@pytest.mark.skipif(native.kernels() is None, reason="only the native decoder takes light models")
def test_memory_is_checked_for_the_weights_that_are_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(own_engine, "check_memory", lambda *_, weights, **__: asked.append(weights))
    for tiles, dtype in ((True, "float32"), (True, "bfloat16"), (False, "bfloat16")):
        monkeypatch.setattr(native, "has_tiles", lambda tiles=tiles: tiles)
        own_engine.load_share(Settings(model=str(folder), device="cpu", dtype=dtype), None)
    assert asked == ["stored", "auto", "stored"]


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


def refused(folder: Path, weights: str, match: str, **more: str) -> None:
    settings = {"device": "cpu", "dtype": "float32", "weights": weights} | more
    with pytest.raises(ModelError, match=match) as found:
        own_engine.load_share(Settings(model=str(folder), **settings), None)
    assert "\n" not in str(found.value)


def test_without_a_gguf_there_is_nothing_stored(tmp_path: Path) -> None:
    refused(make_tiny_model(tmp_path), "stored", f"holds no {STORED}")


def test_without_native_kernels_weights_are_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "kernels", lambda: None)
    refused(folder, "int8", "here: no C\\+\\+ compiler")


def test_weights_that_are_quantised_already_are_left_so(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    refused(folder, "int8", "quantised already; leave it at auto")


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
