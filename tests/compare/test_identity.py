"""Which code a comparison is said to have been made with."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from laps_sd.compare import identity

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("code")
    for name in ("protos", "gateway", "scheduler_service", "worker_service", "laps_sd"):
        shutil.copytree(ROOT / name, folder / name)
    return folder


def test_equal_code_is_the_same_wherever_it_is(copy: Path) -> None:
    assert identity.serving_code(copy) == identity.serving_code()


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("gateway/__main__.py", True),
        ("laps_sd/stack.py", True),
        ("laps_sd/compare/live.py", True),
        ("laps_sd/compare/design.py", True),
        ("laps_sd/compare/page.py", False),
        ("scheduler_service/sim/results.py", False),
    ],
)
def test_code_counts_if_figures_of_a_run_depend_on_it(copy: Path, file: str, counts: bool) -> None:
    text = (copy / file).read_text()
    (copy / file).write_text(text + "# changed")
    changed = identity.serving_code(copy) != identity.serving_code()
    (copy / file).write_text(text)
    assert changed == counts


def test_a_drafter_trained_anew_in_its_folder_is_another(tmp_path: Path) -> None:
    for name in ("model", "drafter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "llama"}')
        (tmp_path / name / "tokenizer.json").write_text("{}")
        save_file({"w": torch.zeros(3)}, tmp_path / name / "model.safetensors")
    names = str(tmp_path / "model"), str(tmp_path / "drafter")
    before = identity.made_with(*names)
    save_file({"w": torch.ones(3)}, tmp_path / "drafter" / "model.safetensors")
    after = identity.made_with(*names)
    assert {name for name in before if before[name] != after[name]} == {"drafter"}
