"""`laps-sd compare` from its first line to its last, on a tiny model: whole services, stopped in between."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from laps_sd.compare.design import BASE
from scheduler_service.sim.workload import read_workload
from tests.tiny_model import make_tiny_model

RUN_S = 600.0


def compare(model: Path, out: Path, *words: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "laps_sd", "compare", "--out", str(out), "--model", str(model), "--keep-faulty"]
    command += ["--requests", "12", "--repetitions", "1", "--taught", "40", "--max-tokens", "4,8,64"]
    command += ["--drafter", "ngram", "--load", "0.85", "--policies", "fcfs,gittins", *words]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    return ran.returncode, ran.stdout, ran.stderr


@pytest.mark.timeout(3 * RUN_S)
def test_a_comparison_goes_on_where_it_was_and_tells_what_it_found(tmp_path: Path) -> None:
    model, out = make_tiny_model(tmp_path / "tiny"), tmp_path / "out"
    code, _, said = compare(model, out, "--minutes", "0.001")  # one run begins within it
    assert code == 0, said
    assert "2 of 3 runs are left" in said
    first = {file.name: file.stat().st_mtime_ns for file in (out / "runs").iterdir()}
    assert list(first) == ["slots2-burst-repetition1-fcfs.json"]

    results, page, recordings = tmp_path / "out.json", tmp_path / "out.html", tmp_path / "recordings"
    words = ["--json", str(results), "--html", str(page), "--recordings", str(recordings)]
    code, table, said = compare(model, out, *words)
    assert code == 0, said
    assert first.items() <= {file.name: file.stat().st_mtime_ns for file in (out / "runs").iterdir()}.items()
    assert "gittins" in table
    assert page.read_text().count("<svg") == 3
    found = json.loads(results.read_text())
    cell = next(cell for cell in found["cells"] if cell["load"] == "0.85")
    assert set(cell["policies"]) == {BASE, "gittins"}
    assert cell["lengths"] == {"answers": 12, "differ": 0}
    assert cell["policies"][BASE]["results"]["completed"] == 12
    for file in recordings.iterdir():
        jobs = read_workload(file)
        assert len(jobs) == 12
        assert all(sum(job.accepted) + len(job.accepted) >= job.output_tokens for job in jobs)
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or ())]


def test_another_engine_is_refused(tmp_path: Path) -> None:
    model, out = tmp_path / "none", tmp_path / "out"
    assert compare(model, out, "--minutes", "0")[0] == 0
    (settings,) = out.glob("settings.json")
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"code": "other"}))
    code, _, said = compare(model, out, "--minutes", "0")
    assert code == 1
    assert "holds runs with another code" in said
