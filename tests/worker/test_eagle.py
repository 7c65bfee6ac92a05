"""EAGLE-3 heads in the public format: they draft what their definition says, whatever became of their KV, and change no
text; what is none is refused before anything is served."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worker.eagles import LAYERS, Reference, make_eagle
from tests.worker.harness import Driver, Tiny
from tests.worker.test_exactness import TEXTS
from worker_service.drafters import eagle_drafter, make_drafter
from worker_service.engine import native
from worker_service.engine.drafting.drafter import ALL, Ask, NoDrafter, Price
from worker_service.engine.drafting.eagle import load_eagle, parse_config
from worker_service.engine.drafting.eagle_drafter import EagleDrafter
from worker_service.engine.drafting.eagle_layer import NativeEagleLayer, TorchEagleLayer
from worker_service.engine.types import Limits, Run, Sampling
from worker_service.engine.warm_up import measure
from worker_service.model_files import ModelError
from worker_service.models import LoadedModel, load


@pytest.fixture(scope="module")
def target(tiny: Tiny) -> LoadedModel:
    return load(str(tiny.folder), "cpu", "float32")


def drafter_of(folder: Path, target: LoadedModel, blocks: int = 256) -> EagleDrafter:
    """It proposes all that it is asked for."""
    return eagle_drafter(load_eagle(folder), target, blocks=blocks, block_tokens=16, price=ALL)


class Proposals:
    """All that a drafter was asked, and its answers."""

    def __init__(self, drafter: EagleDrafter) -> None:
        self.all: list[tuple[list[int], int, list[int]]] = []
        propose = drafter.propose

        def noted(asks: Sequence[Ask]) -> list[list[int]]:
            answers = propose(asks)
            self.all.extend((list(ask.tokens), ask.draft_len, own) for ask, own in zip(asks, answers, strict=True))
            return answers

        drafter.propose = noted  # type: ignore[method-assign]

    def right(self, reference: Reference) -> int:
        """How many drafts there are, all of which are those of `reference`."""
        for tokens, count, drafts in self.all:
            assert drafts == reference.drafts(tokens, count)
        return sum(len(drafts) for _, _, drafts in self.all)


def admit(driver: Driver, tiny: Tiny, count: int = 5, tokens: int = 20) -> None:
    for i, text in enumerate(TEXTS[:count]):
        driver.admit(str(i), tiny.prompt(text), Limits(tokens), Sampling(temperature=i % 2, seed=i))


@pytest.mark.parametrize("fields", [{}, {"norm_before_residual": True}, {"num_key_value_heads": 4}], ids=str)
@pytest.mark.parametrize("native_code", [True, False], ids=["native", "torch"])
def test_drafts_are_those_of_the_definition_token_for_token(
    tiny: Tiny,
    target: LoadedModel,
    fields: dict[str, Any],
    native_code: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not native_code:
        monkeypatch.setattr(native, "kernels", lambda: None)
    folder = make_eagle(tmp_path, tiny.model, **fields)
    drafter = drafter_of(folder, target)
    natively = native.kernels() is not None and not fields.get("norm_before_residual")
    assert type(drafter._layer) is (NativeEagleLayer if natively else TorchEagleLayer)
    proposals, driver = Proposals(drafter), Driver(tiny.engine(drafter=drafter))
    admit(driver, tiny)
    driver.finish_all(draft_len=lambda n: n % 6)
    assert proposals.right(Reference(folder, tiny.model)) > 200


def test_offloaded_requests_lose_nothing(tiny: Tiny, target: LoadedModel, tmp_path: Path) -> None:
    drafter = drafter_of(make_eagle(tmp_path, tiny.model), target)
    proposals, driver = Proposals(drafter), Driver(tiny.engine(drafter=drafter, host_blocks=100))
    admit(driver, tiny)
    for round_ in range(200):
        if not (live := driver.live):
            break
        if round_ % 3 == 2:
            driver.engine.offload(live[0])
        driver.step((Run(name, 3, 16) for name in live), slots=3)
    assert proposals.right(Reference(tmp_path, tiny.model)) > 100


@pytest.mark.parametrize("blocks", [256, 20], ids=["much memory", "little memory"])
def test_text_is_the_same_with_and_without_whatever_becomes_of_requests(
    tiny: Tiny, target: LoadedModel, tmp_path: Path, blocks: int
) -> None:
    outputs = []
    for kind in ("plain", "eagle"):
        drafter = drafter_of(make_eagle(tmp_path, tiny.model), target, blocks) if kind == "eagle" else NoDrafter()
        driver = Driver(tiny.engine(drafter=drafter, host_blocks=20))
        admit(driver, tiny, 8, 30)
        driver.disturb(Random(7), 150, 4)
        driver.finish_all()
        outputs.append(driver.outputs)
        if isinstance(drafter, EagleDrafter):
            assert sum(row.drafted for row in driver.rows) > 100
            driver.forget_all()
            assert drafter._pool.free_blocks == drafter._pool.blocks
            assert not drafter._states
            assert drafter._unread == 0
    assert outputs[0] == outputs[1]


def dropped(driver: Driver) -> None:
    driver.engine.drop("0")


def admitted_again(driver: Driver) -> None:
    driver.readmit("0", len(driver.outputs["0"]) - 1)


@pytest.mark.parametrize("lose", [dropped, admitted_again])
def test_a_request_that_lost_its_kv_drafts_again_and_sees_what_was_cached(
    tiny: Tiny, target: LoadedModel, tmp_path: Path, lose: Callable[[Driver], None]
) -> None:
    drafter = drafter_of(make_eagle(tmp_path, tiny.model), target)
    driver = Driver(tiny.engine(drafter=drafter))
    driver.admit("0", tiny.prompt("".join(TEXTS))[:40], Limits(60, ignore_eos=True))
    while len(driver.outputs["0"]) < 12:
        driver.step([Run("0", 3, 64)])
    lose(driver)
    before = len(driver.rows)
    while driver.rows[-1].drafted == 0 or len(driver.rows) == before:
        assert len(driver.rows) < before + 4
        driver.step([Run("0", 3, 64)])
    state = drafter._states["0"]
    assert state.skipped < drafter._pool.block_tokens  # but for the last block all was shared
    assert state.end > 8


def test_a_second_request_with_the_same_beginning_drafts_as_if_it_had_been_read(
    tiny: Tiny, target: LoadedModel, tmp_path: Path
) -> None:
    drafter = drafter_of(make_eagle(tmp_path, tiny.model), target)
    proposals, driver = Proposals(drafter), Driver(tiny.engine(drafter=drafter))
    prompt = tiny.prompt("".join(TEXTS))[:33]
    for name, own in (("a", [5]), ("b", [6, 7]), ("c", [])):
        driver.admit(name, [*prompt, *own], Limits(10, ignore_eos=True))
        driver.finish_all(draft_len=lambda n: 2)
    prefilled = [sum(row.prefilled for row in driver.rows if row.request_id == name) for name in "abc"]
    assert prefilled == [34, 3, 1]
    assert proposals.right(Reference(tmp_path, tiny.model)) > 10


def test_states_do_not_pile_up_while_nobody_asks_for_drafts(
    tiny: Tiny, target: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_service.engine.drafting.eagle_drafter._MOST_UNREAD", 30)
    drafter = drafter_of(make_eagle(tmp_path, tiny.model), target)
    proposals, driver = Proposals(drafter), Driver(tiny.engine(drafter=drafter))
    admit(driver, tiny, 3, 40)
    while driver.live:
        driver.step(Run(name, 2 if len(driver.outputs[name]) > 25 else 0, 16) for name in driver.live)
        assert drafter._unread <= 30
    assert proposals.right(Reference(tmp_path, tiny.model)) > 5


def test_the_warm_up_times_its_drafting_and_leaves_nothing(tiny: Tiny, target: LoadedModel, tmp_path: Path) -> None:
    drafter = drafter_of(make_eagle(tmp_path, tiny.model), target, blocks=100)
    assert measure(tiny.engine(drafter=drafter), 3).profile.draft_s > 0
    assert drafter._pool.free_blocks == 100


def test_a_folder_is_enough_and_old_files_are_read_too(tiny: Tiny, target: LoadedModel, tmp_path: Path) -> None:
    folder = make_eagle(tmp_path, tiny.model)
    tensors = load_file(folder / "model.safetensors")
    torch.save(
        {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()},
        folder / "pytorch_model.bin",
    )
    (folder / "model.safetensors").unlink()
    drafter = make_drafter(str(folder), target, blocks=10, block_tokens=8)
    assert drafter.layers == tuple(LAYERS)


def test_layers_are_counted_as_others_count_them() -> None:
    plain = {"vocab_size": 10, "hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    nested = plain | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 46, 90]}}
    assert parse_config(plain).layers_of(94) == (2, 47, 91)
    assert parse_config(nested).layers_of(94) == (2, 47, 91)
    assert parse_config(plain | {"eagle_aux_hidden_state_layer_ids": [2, 47, 91]}).layers_of(94) == (2, 47, 91)


def change(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    save_file(tensors if tensor is None else tensors | {name: tensor}, folder / "model.safetensors")


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "No such file"),
    "cut off": (lambda f: (f / "model.safetensors").write_bytes(b"\x10" * 9), "its weights cannot be read"),
    "a tensor missing": (lambda f: change(f, "fc.weight", None), "first is fc.weight"),
    "no map": (lambda f: change(f, "d2t", None), "first is d2t"),
    "a strange tensor": (lambda f: change(f, "fc.weight_scale", torch.ones(1)), "no EAGLE-3 head has"),
    "another shape": (lambda f: change(f, "norm.weight", torch.ones(3)), r"norm.weight has the shape \(3,\)"),
    "another width": (lambda f: change(f, "fc.weight", torch.ones(64, 100)), "fc takes 100 numbers"),
    "two layers": (lambda f: change(f, "fc.weight", torch.ones(64, 128)), "not those of 3 layers"),
    "a wild map": (lambda f: change(f, "d2t", torch.full((100,), 5000)), "d2t leads to tokens"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_such_head_is_refused_in_a_sentence(
    case: str, tiny: Tiny, target: LoadedModel, tmp_path: Path
) -> None:
    spoil, message = BAD[case]
    spoil(make_eagle(tmp_path, tiny.model))
    with pytest.raises(ModelError, match=message) as found:
        make_drafter(str(tmp_path), target, blocks=10, block_tokens=8)
    assert "\n" not in str(found.value)


def test_where_drafts_are_dear_those_that_are_likely_wrong_are_left_out(
    tiny: Tiny, target: LoadedModel, tmp_path: Path
) -> None:
    folder = make_eagle(tmp_path, tiny.model)

    def drafted(least: float) -> int:
        drafter = drafter_of(folder, target)
        driver = Driver(tiny.engine(drafter=drafter))
        drafter.price(Price(least))
        admit(driver, tiny)
        driver.finish_all()
        return sum(row.drafted for row in driver.rows)

    assert drafted(0.0) > drafted(0.2) >= drafted(1.1) == 0


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"vocab_size": 300}, "another vocabulary"),
    ({"laps_sd_vocabulary": "00"}, "another vocabulary"),
    ({"target_hidden_size": 32}, "hidden states of 32 numbers"),
    ({"eagle_aux_hidden_state_layer_ids": [0, 1, 7]}, "reads layers 0, 1, 7"),
    ({"num_hidden_layers": 2}, "it has 2 layers"),
    ({"model_type": "deepseek_v3"}, "one of deepseek_v3"),
    ({"hidden_act": "gelu"}, "with gelu"),
    ({"hidden_size": "wide"}, "its config.json"),
    ({"head_dim": 1 << 40}, "has the shape"),
    ({"intermediate_size": -1}, "its config.json"),
    ({"target_hidden_size": -1}, "its config.json"),
    ({"draft_vocab_size": 1e30}, "its config.json"),
    ({"rope_theta": "x"}, "its config.json"),
    ({"partial_rotary_factor": 0.5}, "turn 0.5 of each"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.25}}, "turn 0.25"),
    ({"eagle_aux_hidden_state_layer_ids": "top"}, "its config.json"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "no EAGLE-3 head"),
]


@pytest.mark.parametrize(("fields", "message"), FIELDS, ids=lambda value: str(value)[:40])
def test_a_head_for_another_target_or_of_another_kind_is_refused_in_a_sentence(
    fields: dict[str, Any], message: str, tiny: Tiny, target: LoadedModel, tmp_path: Path
) -> None:
    folder = make_eagle(tmp_path, tiny.model)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    if "vocab_size" in fields:
        change(folder, "t2d", torch.ones(300, dtype=torch.bool))
        change(folder, "d2t", torch.zeros(100, dtype=torch.long))
    with pytest.raises(ModelError, match=message) as found:
        make_drafter(str(folder), target, blocks=10, block_tokens=8)
    assert "\n" not in str(found.value)
