"""Pages are made from the JSON alone."""

import csv
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from laps_sd.compare import page
from laps_sd.compare.design import BASE, BURST, Cell, Run
from laps_sd.compare.pace import pace_of
from laps_sd.compare.summary import summarise
from laps_sd.schedbench import against
from laps_sd.schedbench.cells import Shape
from laps_sd.schedbench.stalls import Scale
from tests.compare.builders import SETTINGS, found

SLOW, FAST = [2.0, 4.0] * 24, [1.0, 2.0] * 24


@pytest.fixture(scope="module")
def made_record() -> str:
    runs = [
        found(Run(Cell(2, load), policy, 1), latencies_s)
        for load in (BURST, "0.85")
        for policy, latencies_s in ((BASE, SLOW), ("gittins", FAST))
    ]
    about = {
        "command": "laps-sd compare",
        "settings": {"model": "m", "dtype": "auto", "code": "c", "draft_len": 4, "taught": 40, "requests": 48}
        | {"max_tokens": SETTINGS.max_tokens, "paragraphs": SETTINGS.paragraphs},
        "machine": {"processor": "abacus", "cores": 2},
        "versions": {"python": "3"},
        "prompts": {"files": ["mbpp.jsonl.gz"], "kinds": {"code": 9}},
        "took_s": 60.0,
    }
    return json.dumps(summarise(runs, 4) | about)


@pytest.fixture
def record(made_record: str) -> dict[str, object]:
    """A copy, which each test may change."""
    kept: dict[str, object] = json.loads(made_record)
    return kept


@pytest.fixture
def docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "benchmarks").mkdir()
    monkeypatch.setattr("sys.argv", ["page", str(tmp_path)])
    return tmp_path


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a second to draw; two tests look at them."""
    monkeypatch.setattr(page, "plots", lambda summary: [])


def test_the_page_of_the_docs_has_every_cell_and_says_who_gains(record: dict[str, object], docs: Path) -> None:
    folder = docs / "benchmarks"
    (folder / "record.json").write_text(json.dumps(record))
    figures = dict.fromkeys(
        ("commands_per_cpu_s", "p50_ms", "p99_ms", "max_ms", "inside_p99_ms", "rows_per_cpu_s"), 7.0
    )
    alone = figures | {
        "workers": 64,
        "waiting": 10_000,
        "tenants": 2,
        "gateways": 3,
        "redis_share": 0.2,
        "stored_share": 0.5,
    }
    alone |= {"ended_per_command": 0.5, "bytes_per_request": 2048}
    scheduler = {"slots": 32, "seconds": 10.0, "policy": "default", "python": "3", "cells": [alone]}
    (folder / "scheduler.json").write_text(json.dumps(scheduler))
    page.main()
    text = (docs / "explanation" / "benchmarks.md").read_text()
    assert (
        "|2 slots, load 0.85|0.50 (0.50 to 0.50)|3.00 s, 1.50 s|4.00 s, 2.00 s|1.00 ms, 1.00 ms|0 %, 0 %|0.00|" in text
    )
    assert "- `gittins`: below fcfs in 2 of 2 cells, above it in 0." in text
    assert "9 code to draw from, of MBPP (Austin et al. 2021, CC BY 4.0)" in text
    assert "|64|10,000|2|3|7|7|50 %|0.50|20 %|7.0, 7.0, 7.0|7.0|2.0|" in text
    assert {file.name for file in folder.glob("*.svg")} == {"ratios.svg", "latencies.svg", "predicted.svg"}


def test_the_page_of_this_repository_is_made_from_its_records_alone(
    docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path(__file__).parents[2] / "docs"
    plots = [("Mean latency over that of fcfs", "ratios.svg", "")]
    monkeypatch.setattr(page, "plots", lambda summary: plots)  # they differ with matplotlib's version
    for file in (real / "benchmarks").glob("*.json"):
        shutil.copy(file, docs / "benchmarks")
    page.main()
    for name in ("explanation/benchmarks.md", *(f"benchmarks/{name}.csv" for name in ("cells", "unpaced", "opening"))):
        assert (docs / name).read_text() == (real / name).read_text(), f"{name}: python -m laps_sd.compare.page"


@pytest.mark.usefixtures("without_plots")
def test_longest_pauses_have_a_column_where_they_were_recorded(record: dict[str, object], docs: Path) -> None:
    text = json.dumps(record).replace('"ttft_ms": {', '"pause_ms": {"p99": 2500.0}, "ttft_ms": {')
    (docs / "benchmarks" / "record.json").write_text(text)
    page.main()
    text = (docs / "explanation" / "benchmarks.md").read_text()
    assert "|p99 of the longest pause: fcfs, gittins|" in text
    assert "|4.00 s, 2.00 s|1.00 ms, 1.00 ms|2.50 s, 2.50 s|0 %, 0 %|0.00|" in text
    assert ",2500.0," in (docs / "benchmarks" / "cells.csv").read_text()


@pytest.mark.usefixtures("without_plots")
def test_every_figure_of_every_policy_is_in_a_table_beside_the_page(record: dict[str, object], docs: Path) -> None:
    (docs / "benchmarks" / "record.json").write_text(json.dumps(record))
    page.main()
    rows = list(csv.DictReader((docs / "benchmarks" / "cells.csv").read_text().splitlines()))
    assert [row["policy"] for row in rows] == [BASE, "gittins", "oracle"] * 2
    assert (rows[1]["mean ms"], rows[1]["over fcfs (95 %)"]) == ("1500.0", "0.500 (0.500 to 0.500)")


@pytest.mark.usefixtures("without_plots")
def test_the_page_tells_the_pace_and_what_is_without_one(record: dict[str, object], docs: Path) -> None:
    folder = docs / "benchmarks"
    (folder / "unpaced.json").write_text(json.dumps(record))
    settings = {**record["settings"], "pace": asdict(pace_of("t_verify_ms=13,t_verify_slope=0.035"))}  # type: ignore[dict-item]
    (folder / "record.json").write_text(json.dumps({**record, "settings": settings, "latest_s": 0.123}))
    page.main()
    text = (docs / "explanation" / "benchmarks.md").read_text()
    assert "step takes 13.0 ms, 3.5 % more a further request" in text
    assert "none was more than 0.12 s late" in text
    assert "[unpaced.csv](../benchmarks/unpaced.csv)" in text
    assert "0.500 (0.500 to 0.500)" in (folder / "unpaced.csv").read_text()


@pytest.mark.usefixtures("without_plots")
@pytest.mark.parametrize("name", ["opening", "longer"])
def test_a_further_comparison_tells_first_tokens_too(name: str, record: dict[str, object], docs: Path) -> None:
    folder = docs / "benchmarks"
    (folder / "record.json").write_text(json.dumps(record))
    further = {**record, "settings": {**record["settings"], "seed": 11}}  # type: ignore[dict-item]
    cell = further["cells"][0]  # type: ignore[index]
    own = cell["policies"]["gittins"]
    own |= {"ttft_ms": {**own["ttft_ms"], "p99": 0.2}, "pause_ms": {"p99": 300.0}, "equal_speed_ratio": 0.61}
    cell["oracle"]["predicted_ratio"] = 0.42
    (folder / f"{name}.json").write_text(json.dumps(further))
    page.main()
    text = (docs / "explanation" / "benchmarks.md").read_text()
    assert "with another seed (11): 48 requests a run" in text
    assert "|2 slots, load 0.85|gittins|1|0.50 (0.50 to 0.50)|0.61|2.00 s|0.20 ms|0.20|300 ms|0 %|0.00|" in text
    assert "|2 slots, load 0.85|oracle|||0.42|" in text
    assert "*In time*: the share of requests whose first token came within 1000 ms" in text
    assert ("the mean answer had 10 tokens" in text) == (name == "longer")
    assert "0.500 (0.500 to 0.500)" in (folder / f"{name}.csv").read_text()


@pytest.mark.usefixtures("without_plots")
def test_disturbed_runs_of_every_table_are_named(record: dict[str, object], docs: Path) -> None:
    folder = docs / "benchmarks"
    settings = {**record["settings"], "pace": asdict(pace_of("t_verify_ms=13")), "seed": 11}  # type: ignore[dict-item]
    (folder / "record.json").write_text(json.dumps({**record, "settings": settings}))
    disturbed = {**record, "settings": settings, "latest_s": 0.1}
    disturbed["cells"][0]["policies"]["gittins"]["faults"] = 1  # type: ignore[index]
    for name in ("unpaced", "opening"):
        (folder / f"{name}.json").write_text(json.dumps(disturbed))
    page.main()
    text = (docs / "explanation" / "benchmarks.md").read_text()
    assert text.count("- 2 slots, load 0.85, gittins: 1 of 1 runs were disturbed.") == 1
    for name in ("unpaced", "opening"):
        rows = list(csv.DictReader((folder / f"{name}.csv").read_text().splitlines()))
        assert [row["disturbed"] for row in rows[:2]] == ["0", "1"]


@pytest.mark.usefixtures("without_plots")
def test_what_is_wrong_with_the_runs_stands_on_the_page(record: dict[str, object], docs: Path) -> None:
    record["cells"][0]["policies"]["gittins"]["idle_share"] = 0.5  # type: ignore[index]
    (docs / "benchmarks" / "record.json").write_text(json.dumps(record))
    page.main()
    text = (docs / "explanation" / "benchmarks.md").read_text()
    assert "- 2 slots, load 0.85, gittins: the model waited for the scheduler 50.0% of the time." in text


@pytest.mark.usefixtures("without_plots")
def test_the_page_names_every_machine(record: dict[str, object], docs: Path) -> None:
    machines = [{"processor": "abacus", "cores": cores} for cores in (2, 4)]
    (docs / "benchmarks" / "record.json").write_text(json.dumps(record | {"machines": machines}))
    page.main()
    text = (docs / "explanation" / "benchmarks.md").read_text()
    assert "live, on 2 cores of a CPU (abacus) and on 4 cores of a CPU (abacus)" in text


def test_the_html_stands_alone(record: dict[str, object]) -> None:
    text = page.html(record, {"model": "tiny", "machine": "EPYC, 2 cores"})
    assert text.count("<svg") == 3
    assert "EPYC, 2 cores" in text
    assert "http" not in text.replace("http://www.w3.org", "")
    assert "2 slots, burst" in text


def test_latencies_of_as_many_other_requests_are_not_drawn() -> None:
    had = {BASE: (1, 2), "las": (1, 3), "gittins": (1, 2)}
    runs = [found(Run(Cell(2, "0.85"), name, each), SLOW) for name, some in had.items() for each in some]
    capacities = [found(Run(Cell(2, BURST), BASE, repetition), SLOW) for repetition in (1, 2, 3)]
    axes = page._shares(json.loads(json.dumps(summarise([*capacities, *runs], 4)))).axes
    assert [line.get_label() for line in axes[0].lines] == [BASE, "gittins"]


def test_latencies_of_fewer_requests_are_not_drawn_and_the_html_tells_the_runs() -> None:
    cell = Cell(2, "0.85")
    runs = [found(Run(place, BASE, repetition), SLOW) for place in (Cell(2, BURST), cell) for repetition in (1, 2)]
    summary = summarise([*runs, found(Run(cell, "las", 1), FAST)], 4)
    (axis, *_) = page._shares(summary).axes
    assert [line.get_label() for line in axis.lines] == [BASE]
    text = page.html(summary, {})
    assert "48 to 96 requests a policy" in text
    assert "<td>las</td><td>1</td>" in text


@pytest.mark.usefixtures("without_plots")
def test_the_page_has_a_table_for_each_measurement_of_the_scheduler(record: dict[str, object], docs: Path) -> None:
    shape = Shape(workers=8, waiting=10_000)
    theirs = {"commands_per_cpu_s": 100.0, "ended_per_command": 0.5}
    ratio = against.ratio(shape, [{**theirs, "rows_per_cpu_s": 6400.0, "rows_per_command": 32.0}], [theirs], slots=32)
    held = {"turn_ms": 4.0, "call_cpu_ms": 2.0}
    stall = asdict(Scale()) | {"event": "Stats", "scheduler": held, "gateway": held}
    names = ["workers", "slots", "waiting", "report_within_ms", "commands_per_s", "rows_per_s", "busy"]
    names += ["mean_latency_s", "p99_gap_ms", "preemptions", "late_rounds", "most_late_rounds"]
    sections = {"against": [ratio], "stalls": [stall], "packed": [dict.fromkeys(names, 1)]}
    settings = {"slots": 32, "seconds": 10.0, "policy": "default", "python": "3", "cells": []}
    (docs / "benchmarks" / "scheduler.json").write_text(json.dumps(settings | sections))
    (docs / "benchmarks" / "record.json").write_text(json.dumps(record))
    page.main()
    text = (docs / "explanation" / "benchmarks.md").read_text()
    assert "2.00 (2.00 to 2.00) with 8 workers." in text
    assert "|Stats|4.0|2.0|4.0|2.0|" in text
    assert "|1|1|1|1|1|1|100 %|1.000|1|1|1.00|1|" in text
