"""The LAPS-SD paper, reproduced: what is measured, and what the page says of it."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from scheduler_service.sim import paper, paper_page
from scheduler_service.sim.journal import Journal
from scheduler_service.sim.worker import SimFleet
from tests.simulator.builders import SECOND, job

TINY = paper.Scale(requests=4, seeds=2, loads=(0.5,), slots=(2, 32))


def bench_paper(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr("sys.argv", ["paper", *map(str, words)])
    paper.main()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return reproduce(tmp_path_factory.mktemp("results"))


def reproduce(folder: Path, jobs: int = 1, **rest: Any) -> dict[str, Any]:
    with Journal(folder / "unfinished.jsonl", {}) as journal:
        return paper.reproduce(TINY, jobs, journal, **rest)


def test_it_writes_figures_page_and_plots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(paper, "QUICK", TINY)
    bench_paper(monkeypatch, "--quick", "--out", tmp_path)
    page = (tmp_path / "explanation" / "paper.md").read_text()
    assert "4 requests a seed, seeds 1 to 2" in page
    for plot in ("latency", "gain", "ablations", "map"):
        assert f"(../paper/{plot}.svg)" in page
        assert "<svg" in (tmp_path / "paper" / f"{plot}.svg").read_text()
    assert "loads,chat,0.5,gittins," in (tmp_path / "paper" / "figures.csv").read_text()
    written = json.loads((tmp_path / "paper" / "results.json").read_text())
    assert written["settings"]["scale"]["requests"] == 4
    assert f", code {written['code'][0]})." in page


def test_the_page_is_made_anew_from_its_figures(
    results: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "paper"
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(results))
    row = {"p50_ms": 0.25, "p99_ms": 0.75, "max_ms": 2}
    settings = {"slots": 32, "decisions": 3000, "cores": 2, "load_average": 0.5}
    (folder / "decision.json").write_text(json.dumps({"policies": {"las": {"10000": row}}, "settings": settings}))
    bench_paper(monkeypatch, "--page", "--out", tmp_path)
    assert "|las|10,000|0.25|0.75|2.00|1.0|" in (tmp_path / "explanation" / "paper.md").read_text()


def test_the_number_of_processes_changes_nothing(results: dict[str, Any], tmp_path: Path) -> None:
    assert reproduce(tmp_path, jobs=2) == results


def test_what_the_journal_holds_is_not_measured_again(results: dict[str, Any], tmp_path: Path) -> None:
    with suppress(KeyboardInterrupt), Journal(tmp_path / "unfinished.jsonl", {}) as journal:
        journal.add("errors/mix/0.3/2", {"laps-sd": {"mean": 7.0, "median": 8.0, "perceptible": 9.0}})
        raise KeyboardInterrupt
    errors = reproduce(tmp_path)["errors"]
    assert errors["mix"]["0.3"]["laps-sd"]["mean"] == [results["errors"]["mix"]["0.3"]["laps-sd"]["mean"][0], 7.0]
    assert errors["chat"] == results["errors"]["chat"]


def test_equal_figures_are_equal_files(results: dict[str, Any], tmp_path: Path) -> None:
    for folder in ("a", "b"):
        paper_page.write(results, tmp_path / folder)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.*"))
    assert len(files) == 6
    assert all((tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes() for file in files)


def test_one_policy_is_measured_anew_beside_what_was_kept(results: dict[str, Any], tmp_path: Path) -> None:
    kept = json.loads(json.dumps(results))
    kept["loads"]["chat"]["0.5"]["gittins"] = kept["loads"]["chat"]["0.5"]["fcfs"] = {"mean_s": [1, 2], "p99_s": [3, 4]}
    kept["code"] = ["older"]
    anew = reproduce(tmp_path, kept=kept, only=["gittins"])
    assert anew["code"] == ["older", *results["code"]]
    cell = anew["loads"]["chat"]["0.5"]
    assert cell["gittins"] == results["loads"]["chat"]["0.5"]["gittins"]
    assert cell["fcfs"] == {"mean_s": [1, 2], "p99_s": [3, 4]}


def test_every_cell_of_the_map_is_there(results: dict[str, Any]) -> None:
    assert {slots: list(cells) for slots, cells in results["map"].items()} == {"2": ["0.5"], "32": ["0.5"]}
    assert list(paper_page.by_slots(results)) == ["1", "2", "32"]
    assert all(list(cell) == list(paper.MAPPED) for cells in results["map"].values() for cell in cells.values())


def test_a_cell_of_the_map_is_the_gain_over_fcfs() -> None:
    cell = {"fcfs": {"mean_s": [10.0, 20.0]}, "oracle": {"mean_s": [5.0, 12.0]}}
    mean, half = paper_page.gain(cell, "oracle", ["fcfs"])
    assert mean == pytest.approx(0.45)
    assert half == pytest.approx(12.71 * 0.05)


def test_the_error_is_that_of_the_estimate_when_acceptance_became_stable() -> None:
    # Eight rounds of five tokens make it perceptible: 100 tokens seem to take 20 rounds. In truth each of the other
    # sixty tokens takes a round of its own: 68 rounds in all.
    falling = job("falling", 0, 100, (4,) * 8 + (0,) * 60, predicted_output_tokens=100)
    steady = job("steady", 0, 100, (4,), predicted_output_tokens=100)
    short = job("short", 0, 10, (4,), predicted_output_tokens=10)  # ends before it is known
    errors = paper.estimation_errors([falling, steady, short], SimFleet(costs=SECOND))
    assert sorted(errors) == pytest.approx([0.0, 48 / 68])
    assert paper.estimation_errors([falling], SimFleet(costs=SECOND)) == pytest.approx([48 / 68])  # nobody waits


def test_a_gain_below_the_mean_of_three_is_seed_by_seed() -> None:
    cell = {name: {"mean_s": [mean]} for name, mean in (("fcfs", 10.0), ("sjf", 5.0), ("las", 9.0), ("laps-sd", 4.0))}
    assert paper_page.gain(cell, "laps-sd", paper_page.MEAN_OF)[0] == pytest.approx(0.5)


@pytest.mark.parametrize("gain", [0.38, 0.40])
def test_the_page_says_where_the_headline_is_reached(results: dict[str, Any], gain: float) -> None:
    cell = {policy: {"mean_s": [1.0, 1.0]} for policy in results["loads"]["chat"]["0.5"]}
    cell["laps-sd"] = {"mean_s": [1 - gain, 1 - gain]}
    (total, *_) = paper_page.headline({"settings": results["settings"], "loads": {"chat": {"0.9": cell}}, "tails": {}})
    assert ("reaches it: chat at 0.9" in total) is (gain >= 0.39)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--seeds", "1"], "--seeds at least 2"),
        (["--jobs", "0"], "--jobs must be at least 1"),
        (["--only", "gittins"], "results.json"),
    ],
)
def test_a_wrong_flag_is_refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: list[str],
    complaint: str,
) -> None:
    with pytest.raises(SystemExit):
        bench_paper(monkeypatch, "--out", tmp_path, *words)
    assert complaint in capsys.readouterr().err
