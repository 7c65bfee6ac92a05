"""Which code a comparison is said to have been made with."""

import shutil
from pathlib import Path

import pytest

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
