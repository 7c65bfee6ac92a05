"""`laps-sd simulate` as a person types it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from laps_sd.cli import app


def simulate(*words: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *words], env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.fixture
def workload(tmp_path: Path) -> str:
    path = tmp_path / "work.jsonl"
    rows = [{"arrival_s": i / 10, "prompt_tokens": 5, "output_tokens": 30 + 7 * i % 50} for i in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_it_writes_results_by_policy_and_a_report(workload: str, tmp_path: Path) -> None:
    data, page = tmp_path / "out.json", tmp_path / "out.html"
    words = ["--policy", "fcfs,laps-sd,oracle", "--slots", "2", "--json", str(data), "--html", str(page)]
    ran = simulate("--workload", workload, *words)
    assert ran.exit_code == 0, ran.output
    results = json.loads(data.read_text())["policies"]
    assert list(results) == ["fcfs", "laps-sd", "oracle"]
    assert all(row["completed"] == 20 and row["p99_e2el_ms"] > 0 for row in results.values())
    assert page.read_text().count("<svg") == 4


def test_equal_seeds_write_equal_files(workload: str, tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json", tmp_path / "c.json"]
    for seed, file in zip("112", files, strict=True):
        assert simulate("--workload", workload, "--seed", seed, "--json", str(file)).exit_code == 0
    first, second, other = (json.loads(file.read_text())["policies"] for file in files)
    assert first == second != other


def test_a_setting_goes_to_the_policies_that_have_it(tmp_path: Path) -> None:
    data = tmp_path / "out.json"
    words = ["--policy", "fcfs,laps-sd,laps-sd:key=remaining", "--policy-set", "destination=stay"]
    ran = simulate("--workload", "synthetic:requests=80", *words, "--json", str(data))
    assert ran.exit_code == 0, ran.output
    results = json.loads(data.read_text())["policies"]
    assert results["laps-sd"] != results["laps-sd:key=remaining"]


def test_what_no_worker_can_hold_is_counted_as_failed(workload: str, tmp_path: Path) -> None:
    data, page = tmp_path / "out.json", tmp_path / "out.html"
    words = ["--kv-budget-tokens", "10", "--json", str(data), "--html", str(page)]
    ran = simulate("--workload", workload, "--policy", "fcfs", *words)
    assert ran.exit_code == 0
    assert "no request ended" in ran.output
    row = json.loads(data.read_text())["policies"]["fcfs"]
    assert (row["failed"], row["mean_e2el_ms"]) == (20, None), "no time would be the best of all"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--policy", "nonesuch"], "unknown policy 'nonesuch'"),
        (["--policy", ""], "name at least one"),
        (
            ["--policy", "fcfs", "--policy-set", "queues=3"],
            "'queues=3' is not name=value with a setting of any of fcfs",
        ),
        (["--policy", "oracle:speed=1"], "the oracle has no settings"),
        (["--policy", "nudge:passes=2", "--cells", "2"], "neither --html nor the policies oracle and nudge"),
        (["--plan-lag", "2"], "plan-lag"),
        (["--slots", "0"], "slots"),
        (["--cells", "0"], "cells"),
        (["--cells", "2", "--kill-cell", "9@1"], "'9@1' is not CELL@SECOND, with a cell from 0 to 1"),
        (["--cells", "2", "--route", "nearest"], "'nearest' is not of p2c, affinity, hash, random"),
        (["--kill-cell", "0@1"], "need --cells over 1"),
        (["--hot-tenant", "0.3"], "need --cells over 1"),
    ],
)
def test_a_wrong_flag_is_refused(workload: str, words: list[str], complaint: str) -> None:
    ran = simulate("--workload", workload, *words)
    assert ran.exit_code == 2
    assert complaint in " ".join(ran.output.replace("│", " ").split())


def test_a_bad_workload_is_refused_with_line_and_field(tmp_path: Path) -> None:
    path = tmp_path / "work.jsonl"
    path.write_text('{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": "many"}\n')
    ran = simulate("--workload", str(path))
    assert ran.exit_code == 2
    assert "work.jsonl:1: output_tokens: 'many'" in ran.output


def test_draft_lengths_may_be_chosen_and_bad_ones_are_refused(workload: str, tmp_path: Path) -> None:
    results = []
    for draft_len in ("2", "auto"):
        data = tmp_path / draft_len
        assert simulate("--workload", workload, "--draft-len", draft_len, "--json", str(data)).exit_code == 0
        results.append(json.loads(data.read_text())["policies"]["fcfs"]["spec_decode_num_drafts"])
    assert results[0] != results[1]
    assert "neither auto nor a number" in simulate("--workload", workload, "--draft-len", "-1").output


def test_drafts_from_elsewhere_stages_and_ready_first_are_told_by_flags(tmp_path: Path) -> None:
    means = []
    for apart in ("rtt_ms=500,fan=0,wait=false", "rtt_ms=5,fan=0", "rtt_ms=5,fan=0,ready_first=true"):
        data = tmp_path / "out.json"
        words = ["--policy", "fcfs", "--slots", "2", "--draft-len", "auto", "--drafts-elsewhere", apart]
        ran = simulate("--workload", "synthetic:requests=20,load=inf", *words, "--json", str(data))
        assert ran.exit_code == 0, ran.output
        means.append(json.loads(data.read_text())["policies"]["fcfs"]["mean_e2el_ms"])
    assert means[0] > means[1] > means[2]
    assert simulate("--workload", "synthetic:requests=3", "--stages", "4", "--t-link-ms", "20").exit_code == 0


def test_what_is_wrong_with_a_drafter_is_one_sentence() -> None:
    for words in ("rtt=1", "rtt_ms=-1", "fan=many", "ready_first=perhaps"):
        ran = simulate("--workload", "synthetic:requests=3", "--drafts-elsewhere", words)
        assert ran.exit_code == 2
        assert words.partition("=")[0] in ran.output
