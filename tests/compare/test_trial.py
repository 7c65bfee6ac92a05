"""Policies tried on recorded runs."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from laps_sd.compare import trial
from laps_sd.compare.design import BASE, BURST, Cell, Run
from laps_sd.compare.replay import write_recordings
from laps_sd.compare.summary import summarise
from scheduler_service.sim.workload import read_workload
from tests.compare.builders import found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As docs/benchmarks, of a burst whose first and third repetitions have recordings."""
    runs: list[dict[str, Any]] = [found(Run(Cell(2, BURST), BASE, repetition), [1.0] * 12) for repetition in (1, 2, 3)]
    write_recordings(tmp_path / "recordings", [runs[0], runs[2]], draft_len=4)
    (tmp_path / "record.json").write_text(json.dumps(summarise(runs, 4) | {"settings": {"draft_len": 4}}))
    words = ["--folder", str(tmp_path), "--cells", "2@burst", "--policy", "fcfs"]
    monkeypatch.setattr("sys.argv", ["trial", *words])
    return tmp_path


def test_every_repetition_with_a_recording_counts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial.main()
    assert "2 slots, burst, 2 draws" in capsys.readouterr().out


def test_a_cell_without_a_recording_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file in (folder / "recordings").iterdir():
        file.unlink()
    with pytest.raises(SystemExit):
        trial.main()
    assert "has no recording of 2 slots, burst" in capsys.readouterr().err


def test_less_than_no_draws_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [*sys.argv, "--draws", "-1"])
    with pytest.raises(SystemExit):
        trial.main()
    assert "--draws: 0 or more" in capsys.readouterr().err


def test_recordings_of_runs_without_drafts_can_be_read(tmp_path: Path) -> None:
    write_recordings(tmp_path, [found(Run(Cell(2, BURST), BASE, 1), [1.0] * 3, tokens=5)], draft_len=0)
    (file,) = tmp_path.iterdir()
    assert [job.rounds(4) for job in read_workload(file)] == [5, 5, 5]
