"""Flips are counted where they are: none in float32, position by position what transformers chooses."""

import pytest

from tests.worker.flips import DTYPES, SHAPES, Flips, measure
from tests.worker.harness import Tiny

PROMPTS = ["The quick brown fox", "Once upon a time", "A queue"]


@pytest.fixture(scope="module")
def flips(tiny: Tiny) -> list[Flips]:
    return list(measure(str(tiny.folder), PROMPTS, tokens=200, device="cpu"))


def test_each_dtype_and_shape_is_measured_over_all_positions_but_those_of_prefills(flips: list[Flips]) -> None:
    assert [(row.dtype, row.batch, row.width) for row in flips] == [(d, *shape) for d in DTYPES for shape in SHAPES]
    assert {row.tokens for row in flips} == {len(PROMPTS) * 199}


def test_float32_never_clearly_chooses_another_token_than_transformers(flips: list[Flips]) -> None:
    assert not any(row.clear for row in flips if row.dtype == "float32")


def test_rounded_weights_do(flips: list[Flips]) -> None:
    assert all(0 < row.clear <= row.reference < row.tokens / 10 for row in flips if row.dtype == "bfloat16")
