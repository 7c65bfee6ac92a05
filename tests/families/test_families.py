"""Every family is served right, or refused in a sentence: by the native kernels and by torch's operations, which a GPU
runs."""

import re
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

from tests.families.check import judge
from tests.families.table import FAMILIES

torch.set_num_threads(1)
logging.disable_progress_bar()
logging.set_verbosity_error()


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_served_right_or_refused(name: str, kernels: bool, tmp_path: Path) -> None:
    verdict, refused = judge(name, tmp_path, kernels=kernels), FAMILIES[name].refused
    assert verdict.word == ("refused" if refused else "works"), verdict.note
    assert re.search(refused, verdict.note)
    if refused:
        assert "\n" not in verdict.note


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.refused])
def test_a_family_starts_in_bfloat16(name: str, tmp_path: Path) -> None:
    """The self-check's tolerance is wide enough for it."""
    verdict = judge(name, tmp_path, dtype="bfloat16")
    assert verdict.word == "works", verdict.note


def test_most_families_are_served() -> None:
    assert sum(not family.refused for family in FAMILIES.values()) >= 44
