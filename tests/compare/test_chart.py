"""The README's plot of a comparison."""

import json
from pathlib import Path
from typing import Any

import pytest

from laps_sd.compare import chart

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def record() -> Any:
    return json.loads((DOCS / "benchmarks" / "record.json").read_text())


def test_the_price_stands_beside_the_gain(record: Any) -> None:
    mean, tail = chart.chart(record).axes
    told = {label.get_text() for axis in (mean, tail) for label in axis.texts}
    row = next(cell for cell in record["cells"] if cell["name"] == chart.CELL)["policies"]["gittins"]
    assert {f"{row['ratio']['value']:.2f}", f"{row['e2el_ms']['p99'] / 1e3:.1f}"} <= told


def test_policies_that_served_fewer_requests_are_left_out(record: Any) -> None:
    mean, _ = chart.chart(record).axes
    assert len(mean.get_yticklabels()) == 4


def test_the_plot_that_the_readme_shows_is_of_the_record(record: Any) -> None:
    shown = (DOCS / "benchmarks" / "policies.svg").read_text()
    mean, _ = chart.chart(record).axes
    assert all(f">{label.get_text()}<" in shown for label in mean.texts)
