"""The page says what the figures say. vLLM is not needed for that."""

import json
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="it draws the chart; vLLM's environment has none")

from tests.vllm.in_steps_page import DOCS, figures, leave_off, opening, sentence


def row(slots: int | None, mean: float, known: str = "learned", load: float = 0.9) -> dict[str, Any]:
    return {"slots": slots, "known": known, "load": load, "ratio": {"mean": [mean, 0.1]}}


def test_the_page_is_made_of_the_figures() -> None:
    rows = json.loads((DOCS / "benchmarks" / "vllm_steps.json").read_text())
    page = (DOCS / "how-to" / "vllm.md").read_text()
    assert opening(rows) in page
    assert figures(rows) in page


def test_it_is_left_off_from_where_on_no_more_slots_pay() -> None:
    assert leave_off([row(8, 0.95), row(2, 0.6), row(4, 0.8), row(None, 0.5)]) == 8
    assert leave_off([row(2, 0.95), row(4, 0.8), row(8, 0.96)]) == 8
    assert leave_off([row(2, 0.6), row(4, 0.97, "nothing"), row(4, 0.97, load=0.7)]) is None


def test_where_it_paid_everywhere_nothing_is_said_of_more() -> None:
    assert sentence([row(2, 0.6), row(4, 0.7)]).startswith("With up to 4 running at once it paid")
