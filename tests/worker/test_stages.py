"""A model over several stages: the text of one process, whatever happens to requests between their rounds; and which
models cannot be spread."""

from array import array
from pathlib import Path
from random import Random

import pytest
import torch

from tests.families.check import save
from tests.families.table import FAMILIES
from tests.tiny_model import make_tiny_model
from tests.worker.harness import Driver, Tiny
from tests.worker.staged import staged_engine
from tests.worker.test_branches import Forking, answered, texts
from tests.worker.test_exactness import TEXTS
from worker_service.capacity import check_memory, read_config
from worker_service.engine import native
from worker_service.engine.attention import QueryRange
from worker_service.engine.drafting.drafter import NoDrafter
from worker_service.engine.stages import Call, Stage
from worker_service.engine.types import Limits, Place, Sampling
from worker_service.model_files import ModelError
from worker_service.models import load

LAYERS = 5
GREEDY, HOT = Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=11)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of LAYERS layers, with heads that tiles take (kernels/tiles.h)."""
    return make_tiny_model(tmp_path_factory.mktemp("deep"), layers=LAYERS, heads=2)


def outputs(folder: Path, tiny: Tiny, size: int, dtype: str, disturbed: bool, **options: int) -> list[list[int]]:
    driver = Driver(staged_engine(folder, size, dtype, **options))  # type: ignore[arg-type]
    for i, text in enumerate(TEXTS[:8]):
        driver.admit(str(i), tiny.prompt(text), Limits(max_tokens=24), HOT if i % 2 else GREEDY)
    if disturbed:
        driver.disturb(Random(size), actions=60, slots=5)
        assert driver.preempted["drop"]
        assert driver.preempted["offload"]
        assert driver.preempted["keep"]
    driver.finish_in_little_memory()
    driver.forget_all()
    assert sum(row.accepted for row in driver.rows) > 10  # speculation took part
    return [driver.outputs[name] for name in driver.admitted]


@pytest.mark.parametrize(
    ("block_tokens", "dtype"),
    [(8, "float32"), (16, "float32"), (16, "bfloat16"), (32, "bfloat16")],
    ids=["torch", "native", "bfloat16", "tiles"],
)
@pytest.mark.parametrize("size", [2, 3])
def test_the_text_is_that_of_one_process(deep: Path, tiny: Tiny, size: int, block_tokens: int, dtype: str) -> None:
    if dtype == "bfloat16" and native.kernels() is None:
        pytest.skip("torch's bfloat16 sums depend on the pass")
    options = {"block_tokens": block_tokens, "blocks": 384 // block_tokens, "host_blocks": 128 // block_tokens}
    whole = outputs(deep, tiny, 1, dtype, False, block_tokens=block_tokens)
    assert outputs(deep, tiny, size, dtype, True, **options) == whole


def test_hidden_states_for_the_drafter_are_those_of_one_process(deep: Path) -> None:
    found = []
    for size in (1, 3):
        target = staged_engine(deep, size).target
        found.append(target._compute([5, 6, 7, 8], [0, 1, 2, 3], [1, 3], [QueryRange(0, 4, 0, array("i", [0]))]))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


class Blind(Forking):
    layers = ()  # whose states it would be given: other stages have them


def test_a_branch_that_is_followed_changes_no_text(deep: Path, tiny: Tiny) -> None:
    plain = answered(tiny, staged_engine(deep, 1, drafter=NoDrafter()), GREEDY)
    forked = answered(tiny, staged_engine(deep, 3, drafter=Blind(texts(tiny, plain))), GREEDY)
    assert forked.outputs == plain.outputs
    assert len(forked.rows) < 0.7 * len(plain.rows), "branches were not followed"


def test_one_call_goes_round_for_each_pass(deep: Path, tiny: Tiny) -> None:
    engine = staged_engine(deep, 3)
    driver = Driver(engine)
    driver.admit("a", tiny.prompt(TEXTS[2]), Limits(max_tokens=20))
    before = engine.target._ring.calls  # type: ignore[attr-defined]
    driver.finish_all()
    assert engine.target._ring.calls - before == len(driver.rows)  # type: ignore[attr-defined]


def test_a_stage_loads_its_own_layers_alone(deep: Path) -> None:
    names = [set(dict(load(str(deep), "cpu", "float32", place=Place(i, 2)).model.named_parameters())) for i in (0, 1)]
    layers = [{int(name.split(".")[2]) for name in each if ".layers." in name} for each in names]
    assert layers == [{0, 1}, {2, 3, 4}]
    assert "model.embed_tokens.weight" in names[0]
    assert not any("embed" in name or "lm_head" in name for name in names[1])


@pytest.mark.parametrize(("layers", "size"), [(5, 2), (5, 5), (30, 4), (61, 8)])
def test_every_layer_is_in_one_stage(layers: int, size: int) -> None:
    parts = [Place(number, size).layers(layers) for number in range(size)]
    assert [layer for part in parts for layer in part] == list(range(layers))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_memory_is_that_of_the_stage(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_service.capacity.free_bytes", lambda _: 0)
    needs = []
    for place in (Place(), Place(0, 2), Place(1, 2)):
        with pytest.raises(ModelError) as refused:
            check_memory(deep, torch.device("cpu"), torch.float32, kv_tokens=1 << 20, place=place)
        needs.append(float(str(refused.value).split("for weights in float32 and ")[1].split()[0]))
    assert needs[1:] == pytest.approx([0.4 * needs[0], 0.6 * needs[0]], abs=0.02)


def test_more_stages_than_layers_are_refused(deep: Path) -> None:
    with pytest.raises(ModelError, match="has 5 layers, which cannot be spread over 6 stages"):
        read_config(deep, place=Place(0, 6))


def test_layers_that_hand_on_more_than_hidden_states_are_refused(tmp_path: Path) -> None:
    save(FAMILIES["gemma4"], tmp_path)
    with pytest.raises(ModelError, match="its layers hand on per_layer_input, shared_kv_states, so they cannot be"):
        load(str(tmp_path), "cpu", "float32", place=Place(0, 2))


def test_a_stage_says_why_it_has_no_pool_and_those_after_it_pass_that_on(deep: Path) -> None:
    stages = [Stage(load(str(deep), "cpu", "float32", place=Place(i, 3)).model, last=i == 2) for i in (1, 2)]
    stages[0]._model.set_attn_implementation = None  # whatever a model of its own kind breaks with
    call = Call("new_pool", (4, 8, ""))
    for stage in stages:
        call = stage.take(call) or call
    assert stages[0].problem
    assert call.arguments[2] == stages[0].problem


def test_a_stage_without_room_for_its_pool_ends_and_does_not_say_that_it_cannot_serve(deep: Path) -> None:
    stage = Stage(load(str(deep), "cpu", "float32", place=Place(1, 2)).model, last=True)

    def no_room(*_: object) -> None:
        raise torch.OutOfMemoryError

    stage._model.set_attn_implementation = no_room
    with pytest.raises(torch.OutOfMemoryError):
        stage.take(Call("new_pool", (4, 8, "")))
    assert not stage.problem


@pytest.mark.parametrize(
    "call",
    [
        Call("compute", ("torch.float32", [0], [0], []), bytearray(7)),
        Call("compute", ("torch.complex64", [0], [0], []), bytearray(512)),
        Call("compute", ("torch.float32", [0]), bytearray()),
        Call("fly", ()),
    ],
)
def test_a_call_that_is_none_is_refused(deep: Path, call: Call) -> None:
    stage = Stage(load(str(deep), "cpu", "float32", place=Place(1, 2)).model, last=True)
    with pytest.raises(ValueError, match=r"are no hidden states|of another version"):
        stage.take(call)
