"""A comparison that was broken off goes on where it was. Neither vLLM nor the model is needed for that."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.compare import OutOfTime, Runs, _rate_of, expected_tokens
from tests.vllm.compare_page import Key, Lines
from tests.vllm.turns import Asked, Served

KEY = Key("4 slots", 4, "stock", 0.9)


def runs(file: Path, until: float = math.inf) -> Runs:
    return Runs(file, until, lambda lines: None)


def never() -> dict[str, Any]:
    raise AssertionError("it was made again")


def test_a_run_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    runs(tmp_path / "runs.jsonl").of(KEY, lambda: {"tokens_per_s": 3.0})
    assert runs(tmp_path / "runs.jsonl").of(KEY, never)["tokens_per_s"] == 3.0


def test_a_line_that_was_cut_short_is_made_again(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    runs(file).of(KEY, lambda: {"tokens_per_s": 3.0})
    file.write_text(file.read_text() + '[["4 slots", 4, "ord')
    again = runs(file)
    assert list(again.lines) == [KEY]
    again.of(KEY._replace(kind="order"), lambda: {"tokens_per_s": 4.0})
    assert len(runs(file).lines) == 2


def test_once_the_time_is_over_no_run_is_begun(tmp_path: Path) -> None:
    with pytest.raises(OutOfTime):
        runs(tmp_path / "runs.jsonl", until=0.0).of(KEY, never)


def test_after_each_run_the_figures_are_told(tmp_path: Path) -> None:
    told: list[Lines] = []
    made = Runs(tmp_path / "runs.jsonl", math.inf, lambda lines: told.append(dict(lines)))
    made.of(KEY, lambda: {"tokens_per_s": 3.0})
    made.of(KEY, never)
    assert [list(each) for each in told] == [[KEY]]


def test_the_rate_of_a_burst_leaves_out_what_runs_alone_at_its_end() -> None:
    """Two at a time, ten seconds each; the last one runs alone."""
    served = [Served(0.0, 10.0 * (n // 2), 10.0 * (n // 2) + 10, text=[0] * 10) for n in range(5)]
    assert _rate_of(served) == pytest.approx(2.0)


def test_where_nobody_waits_the_rate_is_that_of_the_whole_burst() -> None:
    assert _rate_of([Served(0.0, 1.0, 8.0, text=[0] * 10) for _ in range(4)]) == pytest.approx(5.0)


def test_what_is_expected_of_requests_follows_their_bounds() -> None:
    """Answers came to 10 and 40 tokens; the burst had few large bounds, and the load has many."""
    answers = [[16, 10], [16, 10], [64, 40]]
    assert expected_tokens([Asked([], 16)], answers) == pytest.approx((10 + 10 + 16) / 3)
    assert expected_tokens([Asked([], 64), Asked([], 64)], answers) == pytest.approx(40)
    assert expected_tokens([Asked([], 256)], answers) == 256
