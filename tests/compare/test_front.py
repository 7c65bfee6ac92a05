"""The price of a low mean: settings side by side on draws from a recorded run, and which of them no other beats."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from laps_sd.compare import front
from laps_sd.loadtest.plan import arrivals

ROOT = Path(__file__).parents[2]
FEW = {"no bound": ("gittins:overtaking=0",), "slowdown": ("gittins:overtaking=0:cap=3",), "nudge": ("nudge:passes=1",)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As docs/benchmarks, with a few requests a draw."""
    record = json.loads((ROOT / "docs/benchmarks/record.json").read_text())
    record["settings"]["requests"] = 30
    (tmp_path / "record.json").write_text(json.dumps(record))
    shutil.copytree(ROOT / "docs/benchmarks/recordings", tmp_path / "recordings")
    monkeypatch.setattr(front, "FAMILIES", FEW)
    return tmp_path


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["front", "--folder", str(folder), "--jobs", "1", *words])
    front.main()


def test_it_writes_figures_and_a_plot_and_prints_a_table(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(folder, monkeypatch, "--cells", "2@0.85", "--draws", "2")
    rows = json.loads((folder / "front.json").read_text())["cells"]["2@0.85"]
    assert [len(row["good_share"]) for row in rows.values()] == [2, 2, 2, 2]
    assert "<svg" in (folder / "front.svg").read_text()
    assert "|fcfs|1.000 ±0.000|1" in capsys.readouterr().out
    run(folder, monkeypatch, "--page")
    assert "2@0.85, 2 draws" in capsys.readouterr().out


def test_a_run_that_was_stopped_goes_on_and_more_draws_go_on_from_fewer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[front.Unit] = []
    measured = front._measured

    def stops(unit: front.Unit) -> dict[str, float]:
        done.append(unit)
        if len(done) == 3:
            raise KeyboardInterrupt
        return measured(unit)

    monkeypatch.setattr(front, "pool", Here)
    monkeypatch.setattr(front, "_measured", stops)
    with pytest.raises(KeyboardInterrupt):
        front.measure(folder, ["2@0.85"], 1, 1, 1)
    front.measure(folder, ["2@0.85"], 2, 1, 1)
    assert len(done) == 1 + 2 * 4  # the one that was stopped is the only one that ran twice


class Here:
    """A pool without processes."""

    map = staticmethod(map)

    def __init__(self, processes: int) -> None: ...

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *error: object) -> None: ...


def test_the_front_is_what_no_other_beats() -> None:
    rows: dict[str, dict[str, Any]] = {
        "low": {"mean": 0.6, "p99": 2.0},
        "even": {"mean": 0.8, "p99": 1.0},
        "beaten": {"mean": 0.8, "p99": 2.0},
    }
    assert front.unbeaten(rows, "p99") == {"low", "even"}


def test_a_cell_that_was_not_recorded_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(folder, monkeypatch, "--cells", "3@0.85")
    assert "3@0.85 was not recorded" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--draws", "0"), ("--draws", "-1"), ("--jobs", "0")])
def test_no_draws_and_no_processes_are_refused_and_the_record_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, str]
) -> None:
    (folder / "front.json").write_text("{}")
    with pytest.raises(SystemExit):
        run(folder, monkeypatch, *words)
    assert (folder / "front.json").read_text() == "{}"


def test_a_page_of_no_record_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(folder, monkeypatch, "--page")
    assert "--page: there is no " in capsys.readouterr().err


def test_figures_depend_on_the_code_that_draws_arrivals(folder: Path) -> None:
    assert Path(arrivals.__code__.co_filename) in front._made_of(folder)


def test_a_stopped_run_of_another_record_begins_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(unit: front.Unit) -> dict[str, float]:
        if unit.policy != front.BASE:
            raise KeyboardInterrupt
        seen.append(unit)
        return dict.fromkeys(front.KEPT, 1.0)

    seen: list[front.Unit] = []
    monkeypatch.setattr(front, "pool", Here)
    monkeypatch.setattr(front, "_measured", stops)
    for requests in (30, 30, 31):
        record = json.loads((folder / "record.json").read_text())
        record["settings"]["requests"] = requests
        (folder / "record.json").write_text(json.dumps(record))
        with pytest.raises(KeyboardInterrupt):
            front.measure(folder, ["2@0.85"], 1, 1, 1)
    assert len(seen) == 2
