"""Models that cannot be served: damaged, of a strange architecture, too large. Each is refused with a sentence."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    DiffLlamaConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    Llama4TextConfig,
    MambaConfig,
    MixtralConfig,
    PegasusConfig,
    Phi3Config,
    PhimoeConfig,
    PretrainedConfig,
    Qwen3Config,
)

from tests.tiny_model import make_tiny_model
from tests.worker.eagles import make_eagle
from tests.worker.harness import Tiny
from worker_service import capacity
from worker_service import own_engine as process
from worker_service.config import Settings
from worker_service.engine.drafting.drafter import NoDrafter
from worker_service.engine.engine import Engine
from worker_service.engine.probe import window_of
from worker_service.engine.self_check import MismatchError, check, own_logits
from worker_service.identity import fingerprint, model_name
from worker_service.model_files import ModelError, end_ids
from worker_service.models import load


def with_config(folder: Path, **changes: object) -> Path:
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
    with pytest.raises(ModelError, match=r"its weights have other shapes than its config\.json says"):
        load(str(folder), "cpu", "float32")


def test_a_tokenizer_that_was_never_fetched_is_named(tmp_path: Path) -> None:
    (make_tiny_model(tmp_path) / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelError, match=f"cannot load the tokenizer of {tmp_path}: "):
        load(str(tmp_path), "cpu", "float32")


def test_a_key_that_a_library_does_not_know_is_more_than_its_name(tmp_path: Path) -> None:
    folder = with_config(make_tiny_model(tmp_path), hidden_act="zork")
    with pytest.raises(ModelError, match="'zork' is not known"):
        load(str(folder), "cpu", "float32")


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    folder = with_config(make_tiny_model(tmp_path), num_hidden_layers=3)
    with pytest.raises(ModelError, match=r"weights are not in its files; the first is model\.layers\.2\."):
        load(str(folder), "cpu", "float32")


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (PegasusConfig(), "has an encoder"),
        (MambaConfig(), "has layers that remember something else"),
        (BloomConfig(), "does not let its attention be replaced"),
        (Llama4TextConfig(), "attends in chunks"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_an_architecture_that_is_not_supported_is_refused_by_its_configuration(
    config: PretrainedConfig, problem: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"{problem}.*, so it cannot be served"):
        capacity.read_config(tmp_path)


SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_local_experts": 4}
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}


def check_engine(tiny: Tiny, config: PretrainedConfig) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    expected = own_logits(model, 64)
    engine = Engine(model, tiny.tokenizer, eos_ids=frozenset(), context_tokens=64, blocks=9, drafter=NoDrafter())
    check(engine, expected)
    assert engine.free_blocks == engine.blocks


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=4),
        Qwen3Config(**SMALL),
        MixtralConfig(**SMALL),
        Phi3Config(**SMALL),
        PhimoeConfig(**SMALL, sliding_window=6),  # of which its mask alone tells
        Gemma2Config(**SMALL, sliding_window=6, query_pre_attn_scalar=2),
        Gemma3TextConfig(**SMALL, **WINDOWS),
        GptOssConfig(**SMALL, **WINDOWS, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    ],
    ids=lambda config: config.model_type,
)
def test_the_engine_computes_what_the_model_computes(config: PretrainedConfig, tiny: Tiny) -> None:
    check_engine(tiny, config)


def test_weights_that_are_no_numbers_are_told_as_such(tiny: Tiny) -> None:
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SMALL)).eval()
    model.lm_head.weight.data[0, 0] = float("nan")
    expected = own_logits(model, 64)
    engine = Engine(model, tiny.tokenizer, eos_ids=frozenset(), context_tokens=64, blocks=9, drafter=NoDrafter())
    with pytest.raises(MismatchError, match="its weights are damaged"):
        check(engine, expected)


def test_attention_that_is_combined_in_another_way_is_found_out_before_serving(tiny: Tiny) -> None:
    with pytest.raises(MismatchError, match="differ from its own by"):
        check_engine(tiny, DiffLlamaConfig(**SMALL))


def test_heads_of_another_size_than_configured_never_reach_the_kernels(tiny: Tiny) -> None:
    config = GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=4, head_dim=32)
    with pytest.raises(ValueError, match=r"layer 0 has .*dim=16.*, where its configuration says .*dim=32"):
        check_engine(tiny, config)


def test_a_text_beyond_every_window_is_checked() -> None:
    model = AutoModelForCausalLM.from_config(Gemma3TextConfig(**SMALL, **WINDOWS | {"sliding_window": 40})).eval()
    assert len(own_logits(model, 128).text) > 40 + 13
    assert len(own_logits(model, 50).text) == 24  # no text is longer than the window


def test_windows_are_read_off_a_models_mask() -> None:
    cpu = torch.device("cpu")
    assert window_of(lambda b, h, q, k: k <= q, 100, cpu) == 0
    assert window_of(lambda b, h, q, k: (k <= q) & (k > q - 30), 100, cpu) == 30
    assert window_of(lambda b, h, q, k: (k <= q) & (k > q - 300), 100, cpu) == 0
    assert window_of(lambda b, h, q, k: (k <= q) & (k // 30 == q // 30), 100, cpu) is None
    assert window_of(lambda b, h, q, k: k <= q + 1, 100, cpu) is None


def test_positions_that_change_with_a_texts_length_are_refused_where_texts_may_be_so_long(tiny: Tiny) -> None:
    """Longrope: what was computed of a text below the switch is of no use beyond it."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 4.0}
    changes = {"original_max_position_embeddings": 32, "max_position_embeddings": 128, "head_dim": 16}
    config = Phi3Config(**SMALL | changes, rope_parameters=rope | factors)
    with pytest.raises(
        ValueError, match="turns texts of more than 32 tokens by other frequencies; set kv_tokens to 32"
    ):
        check_engine(tiny, config)


def test_weights_whose_quantiser_is_not_here_are_refused_with_a_sentence(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    with_config(folder, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
    with pytest.raises(ModelError, match=r"cannot load .* \(weights quantised by gptq\): ") as found:
        process.load_share(settings_for(folder), None)
    assert "\n" not in str(found.value)


def test_values_of_a_configuration_that_mean_nothing_are_refused_with_a_sentence(tmp_path: Path) -> None:
    folder = with_config(make_tiny_model(tmp_path), num_attention_heads="four")
    with pytest.raises(ModelError, match="cannot load"):
        process.load_share(settings_for(folder), None)


def test_a_model_that_the_engine_computes_otherwise_is_refused_with_a_sentence(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    config = DiffLlamaConfig(**SMALL | {"vocab_size": len(AutoTokenizer.from_pretrained(folder))})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    settings = settings_for(folder, drafter="none")
    with pytest.raises(ModelError, match="the engine cannot serve this DiffLlamaForCausalLM: logits"):
        process.build_engine(settings, process.load_share(settings, None), 512)


def settings_for(folder: Path, **more: Any) -> Settings:
    return Settings(model=str(folder), device="cpu", dtype="float32", **more)


def test_too_little_memory_is_said_with_numbers_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(tmp_path)
    monkeypatch.setattr(capacity, "free_bytes", lambda device: 3 * 2**20)
    monkeypatch.setattr(process, "load", lambda *_, **__: "loaded")
    monkeypatch.setattr(process, "load_alone", lambda *_: "loaded")
    with pytest.raises(
        ModelError, match=r"too little memory: .* but cpu has 0.00 GiB free; set kv_tokens to (\d+)"
    ) as found:
        process.load_share(settings_for(folder, kv_tokens=100_000), None)
    fits = int(str(found.value).split("set kv_tokens to ")[1].split()[0])
    shutil.copyfile(folder / "model.safetensors", folder / "consolidated.safetensors")  # which nobody loads
    assert process.load_share(settings_for(folder, kv_tokens=fits, block_tokens=1), None) == "loaded"
    with pytest.raises(ModelError, match="too little memory"):
        process.load_share(settings_for(folder, kv_tokens=fits + 1, block_tokens=1), None)


@pytest.mark.parametrize("kind", ["a model", "an EAGLE-3 head"])
def test_memory_of_a_drafter_counts(kind: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.folder
    drafter = make_tiny_model(tmp_path) if kind == "a model" else make_eagle(tmp_path, tiny.model)
    monkeypatch.setattr(capacity, "free_bytes", lambda device: 3 * 2**20)
    monkeypatch.setattr(process, "load", lambda *_, **__: "loaded")
    monkeypatch.setattr(process, "load_alone", lambda *_: "loaded")

    def refused(kv_tokens: int, drafter: str) -> str:
        try:
            process.load_share(settings_for(folder, kv_tokens=kv_tokens, block_tokens=1, drafter=drafter), None)
        except ModelError as error:
            return str(error)
        return ""

    alone, beside = refused(100_000, "ngram"), refused(100_000, str(drafter))
    assert "for its drafter" not in alone
    assert "for its drafter" in beside
    fits, fewer = (int(said.split("set kv_tokens to ")[1].split()[0]) for said in (alone, beside))
    assert refused(fits, "ngram") == refused(fewer, str(drafter)) == ""
    assert refused(fewer + 1, str(drafter))
    assert fewer < fits


def test_a_model_that_is_too_large_by_itself_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "free_bytes", lambda device: 1000)
    with pytest.raises(ModelError, match="it takes more memory or less model"):
        process.load_share(settings_for(make_tiny_model(tmp_path)), None)


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = tmp_path / "pod" / "worker"
    group.mkdir(parents=True)
    for folder, limit in ((group, "max"), (group.parent, "1000000")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("700000\n")
        (folder / "memory.stat").write_text("anon 500000\ninactive_file 200000\n")
    (tmp_path / "own").write_text("0::/pod/worker\n")
    monkeypatch.setattr(capacity, "_CGROUPS", tmp_path)
    monkeypatch.setattr(capacity, "_OWN_CGROUP", tmp_path / "own")
    assert capacity.free_bytes(torch.device("cpu")) == 500_000


@pytest.mark.parametrize(("kv_tokens", "context_tokens", "named"), [(100, 2048, "kv_tokens"), (4096, 64, "context")])
def test_memory_for_less_than_one_request_is_refused(kv_tokens: int, context_tokens: int, named: str) -> None:
    with pytest.raises(ModelError, match=f"{named}: .* too few for a request; 192 are the least"):
        capacity.check_kv_tokens(kv_tokens, context_tokens)


@pytest.mark.parametrize(("named", "ids"), [((None, 2, [2, 3]), {2, 3}), ((99, [100, -1], None), {99}), ((), set())])
def test_an_end_that_has_no_logit_is_left_out(named: tuple[object, ...], ids: set[int]) -> None:
    assert end_ids(named, 100) == ids


@pytest.mark.parametrize("wrong", ["</s>", 1.5, True, {}, [2, "x"]])
def test_an_end_that_is_no_token_id_is_refused(wrong: object) -> None:
    with pytest.raises(ModelError, match="eos_token_id must be a token id"):
        end_ids([wrong], 100)


def test_weights_that_were_not_fetched_have_no_fingerprint(tmp_path: Path) -> None:
    """In their place git leaves a pointer where its extension for large files is missing."""
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ModelError, match="is no safetensors file"):
        fingerprint(tmp_path)


@pytest.mark.parametrize("marker", ["{", "[]", "{}", '"x"'])
def test_a_damaged_marker_names_no_model(tmp_path: Path, marker: str) -> None:
    (tmp_path / "laps-sd.json").write_text(marker)
    assert model_name(tmp_path) == tmp_path.name
