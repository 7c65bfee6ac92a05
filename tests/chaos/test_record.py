"""Runs add up."""

from pathlib import Path

from tests.chaos.record import append, runs, struck, totals


def test_runs_on_one_model_add_up(tmp_path: Path) -> None:
    file = tmp_path / "new" / "runs.jsonl"
    one = {"model": "tiny", "seed": 1, "commit": "a", "faults": {"kill": 2}, "tokens": 5, "longest_pause_s": 3.5}
    two = {
        "model": "tiny",
        "seed": 2,
        "commit": "b",
        "faults": {"kill": 1, "stop": 4},
        "tokens": 7,
        "longest_pause_s": 1.0,
    }
    for run in (one, {**one, "model": "other"}, two):
        append(file, run)
    assert runs(file, "tiny") == [one, two]
    assert struck(runs(file, "tiny")) == 7
    assert totals(runs(file, "tiny")) == {
        "runs": 2, "faults": {"kill": 3, "stop": 4}, "tokens": 12, "longest_pause_s": 3.5,
    }  # fmt: skip
