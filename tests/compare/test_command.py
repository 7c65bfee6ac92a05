"""The flags of `laps-sd compare`; nothing is begun."""

import errno
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from laps_sd.cli import app
from laps_sd.compare.design import BASE, BURST, Cell, Run
from laps_sd.compare.folder import Folder
from tests.compare.builders import SETTINGS, found


def compare(folder: Path, *words: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["compare", "--out", str(folder / "out"), "--minutes", "0", *words]
    )


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Of a comparison that has no run yet."""
    compare(tmp_path)
    settings = json.loads((tmp_path / "out" / "settings.json").read_text())
    return Folder(tmp_path / "out", SETTINGS.__class__(**settings))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--policies", "fastest"], "fastest"),
        (["--policies", "laps-sd:epsilon=high"], "epsilon"),
        (["--load", "much"], "neither burst"),
        (["--slots", "two"], "whole numbers"),
        (["--also", "sjf"], "sjf@2:0.85"),
        (["--max-tokens", "0"], "whole numbers"),
        (["--paragraphs", "chat,resoning"], "'resoning': none of chat, code, reasoning"),
        (["--pace", "t_token_ms=1"], "needs t_verify_ms"),
        (["--pace", "t_verify_ms=13,t_nap_ms=1"], "t_nap_ms"),
        (["--pace", "t_verify_ms=soon"], "finite"),
        (["--requests", "6000"], "only 700 prompts of kind"),
        (["--workload", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--drafter", "nowhere"], "no directory"),
        (["--recordings", __file__], "is a file"),
    ],
)
def test_wrong_flags_are_refused_by_name(tmp_path: Path, words: list[str], says: str) -> None:
    result = compare(tmp_path, *words)
    assert result.exit_code == 2
    assert says in result.output


def test_what_is_missing_is_counted(tmp_path: Path) -> None:
    result = compare(tmp_path, "--load", "0.85,burst", "--repetitions", "2", "--also", "sjf@2:0.85")
    assert result.exit_code == 0
    assert "there is no run yet" in result.output
    assert "14 of 14 runs are left" in result.output


def test_the_default_policy_goes_by_its_own_name(tmp_path: Path) -> None:
    result = compare(tmp_path, "--policies", "default,gittins,fcfs", "--repetitions", "1", "--also", "default@2:0.85")
    assert "3 of 3 runs are left" in result.output  # the capacity, fcfs, gittins


def test_other_settings_go_to_another_folder(tmp_path: Path) -> None:
    compare(tmp_path)
    result = compare(tmp_path, "--seed", "7")
    assert result.exit_code == 1
    assert "holds runs with another seed" in result.output


def test_one_cell_has_results_of_the_policies_by_name(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for policy in (BASE, "las"):
        folder.add(run := Run(Cell(2, BURST), policy, 1), found(run, [1.0, 2.0]))
    monkeypatch.setattr("sys.argv", ["laps-sd", "compare", "--json", str(tmp_path / "out.json")])
    result = compare(tmp_path, "--load", "burst", "--json", str(tmp_path / "out.json"))
    assert "no difference between las and fcfs" in result.output
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["policies"]["las"]["mean_e2el_ms"] == 1500
    assert written["command"] == "laps-sd compare --json out.json"
    assert written["prompts"] == {"files": [], "kinds": {"chat": 700, "code": 700, "reasoning": 700}}


def test_the_run_of_the_capacity_is_no_second_cell(folder: Folder, tmp_path: Path) -> None:
    for load, policy, latency_s in ((BURST, BASE, 9.0), ("0.85", BASE, 2.0), ("0.85", "las", 1.0)):
        folder.add(run := Run(Cell(2, load), policy, 1), found(run, [latency_s, latency_s]))
    compare(tmp_path, "--json", str(tmp_path / "out.json"))
    policies = json.loads((tmp_path / "out.json").read_text())["policies"]
    assert {name: row["mean_e2el_ms"] for name, row in policies.items()} == {BASE: 2000, "las": 1000}


def test_the_machines_are_those_of_the_runs(folder: Folder, tmp_path: Path) -> None:
    for policy, cores in ((BASE, 2), ("las", 2), ("sjf", 4)):
        run = Run(Cell(2, BURST), policy, 1)
        folder.add(run, found(run, [1.0, 2.0]) | {"machine": {"processor": "abacus", "cores": cores}})
    words = ["--json", str(tmp_path / "out.json"), "--html", str(tmp_path / "report.html")]
    result = compare(tmp_path, *words)
    assert result.exit_code == 0
    assert "one repetition was made on 2 machines" in result.output
    written = json.loads((tmp_path / "out.json").read_text())
    assert [each["cores"] for each in written["machines"]] == [2, 4]
    assert written["versions"] == {"python": "3"}
    assert "abacus, 2 cores; abacus, 4 cores" in (tmp_path / "report.html").read_text()


def test_only_what_counts_of_fcfs_is_recorded(folder: Folder, tmp_path: Path) -> None:
    for repetition, policy, faults in ((1, BASE, ()), (1, "las", ()), (2, BASE, ("a standstill",))):
        folder.add(run := Run(Cell(2, BURST), policy, repetition), found(run, [1.0, 2.0], faults=faults))
    compare(tmp_path, "--recordings", str(tmp_path / "recordings"))
    assert [file.name for file in (tmp_path / "recordings").iterdir()] == ["slots2-burst-repetition1-fcfs.jsonl.gz"]


@pytest.mark.parametrize("file", ["settings.json", "runs/slots2-burst-repetition1-fcfs.json"])
def test_a_damaged_file_is_named(tmp_path: Path, file: str) -> None:
    compare(tmp_path)
    (tmp_path / "out" / file).write_text("")
    result = compare(tmp_path)
    assert result.exit_code == 1
    assert f"{file} holds no JSON" in result.output


def test_a_disk_that_is_full_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("laps_sd.compare.work.Work.through", full)
    result = compare(tmp_path)
    assert result.exit_code == 1
    assert "laps-sd: [Errno 28] No space left on device\n" in result.stderr


def test_a_report_without_any_run_that_counts_says_why(folder: Folder, tmp_path: Path) -> None:
    folder.add(run := Run(Cell(2, BURST), BASE, 1), found(run, [1.0, 2.0], faults=("a standstill",)))
    result = compare(tmp_path, "--html", str(tmp_path / "report.html"))
    assert result.exit_code == 0
    assert "since a standstill" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(("left", "says"), [(0, "all runs are left out"), (1, "1 of 1 runs are left")])
def test_a_comparison_that_comes_to_nothing_fails(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int, says: str
) -> None:
    folder.add(run := Run(Cell(2, BURST), BASE, 1), found(run, [1.0, 2.0], faults=("a standstill",)))
    monkeypatch.setattr("laps_sd.compare.work.Work.through", lambda *_: left)  # each run was disturbed twice
    flags = ("--slots", "2", "--load", "burst", "--policies", "fcfs", "--repetitions", "1")
    result = CliRunner().invoke(app, ["compare", "--out", str(tmp_path / "out"), *flags])
    assert result.exit_code == 1
    assert "since a standstill" in result.stdout.replace("\n", " ")
    assert says in result.stderr


def test_runs_by_other_code_of_a_policy_of_ones_own_are_left_out(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for policy, code in ((BASE, ""), ("tests.scheduler.own_policies.Fails", "of yesterday")):
        run = Run(Cell(2, BURST), policy, 1)
        folder.add(run, found(run, [1.0, 2.0]) | {"policy_code": code})
    monkeypatch.setattr("laps_sd.compare.work.Work.through", lambda *_: 0)
    flags = ("--slots", "2", "--load", "burst", "--policies", "fcfs", "--repetitions", "1")
    result = CliRunner().invoke(app, ["compare", "--out", str(tmp_path / "out"), *flags])
    assert result.exit_code == 0, result.stderr
    assert "Fails is left out: its policy's code has changed since" in result.stderr
    assert "Fails" not in result.stdout
