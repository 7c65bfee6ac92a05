"""One run has one draw of arrivals; others are simulated on what it recorded."""

import json
from pathlib import Path
from typing import Any

import pytest

from laps_sd.compare import arrivals, page
from laps_sd.compare.design import BASE, BURST, Cell, Run
from laps_sd.compare.replay import write_recordings
from laps_sd.compare.summary import summarise
from tests.compare.builders import found


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "DRAWS", arrivals.DRAWS[:3])


@pytest.fixture
def summary(tmp_path: Path) -> dict[str, Any]:
    """Of long and short requests in turn, with their recordings in `tmp_path`."""
    runs = []
    for load in (BURST, "0.9"):
        run = found(Run(Cell(2, load), BASE, 1), [1.0] * 60)
        for row in run["requests"][::2]:
            row.update(output_tokens=50, max_tokens=50, drafted=[0] * 50, accepted=[0] * 50)
        runs.append(run)
    write_recordings(tmp_path, runs, draft_len=4)
    capacity = {Run(Cell(2, BURST), BASE, 1).name: 7.0}  # a step takes 10 ms, a request 27.5 of them
    return summarise(runs, 4) | {"settings": {"draft_len": 4, "seed": 0}, "capacity": capacity}


def test_the_same_requests_come_at_other_times_in_every_draw(summary: dict[str, Any], tmp_path: Path) -> None:
    (cell,) = arrivals.other_arrivals(summary, tmp_path)
    assert cell["name"] == "2 slots, load 0.9"
    assert len(set(cell["ratios"]["oracle"])) == len(arrivals.DRAWS)
    assert max(cell["ratios"]["oracle"]) < 1


def test_a_draw_is_the_same_when_made_again(summary: dict[str, Any], tmp_path: Path) -> None:
    assert list(arrivals.other_arrivals(summary, tmp_path)) == list(arrivals.other_arrivals(summary, tmp_path))


def test_a_cell_without_a_recording_is_left_out(summary: dict[str, Any], tmp_path: Path) -> None:
    for file in tmp_path.glob("*.gz"):
        file.unlink()
    assert list(arrivals.other_arrivals(summary, tmp_path)) == []


def test_they_are_made_from_the_record(
    summary: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "record.json").write_text(json.dumps(summary))
    (tmp_path / "recordings").mkdir()
    for file in tmp_path.glob("*.gz"):
        file.rename(tmp_path / "recordings" / file.name)
    monkeypatch.setattr("sys.argv", ["arrivals", str(tmp_path)])
    arrivals.main()
    made = json.loads((tmp_path / "arrivals.json").read_text())
    assert made["draws"] == len(arrivals.DRAWS)
    (cell,) = made["cells"]
    assert page.least_to_most(cell["ratios"]["oracle"]).count("0.") == 3


def test_recordings_that_are_missing_are_named_and_no_empty_file_is_written(
    summary: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "record.json").write_text(json.dumps(summary))
    monkeypatch.setattr("sys.argv", ["arrivals", str(tmp_path)])
    with pytest.raises(SystemExit, match="no cell has a recording"):
        arrivals.main()
    assert "2 slots, load 0.9 is left out" in capsys.readouterr().err
    assert not (tmp_path / "arrivals.json").exists()
