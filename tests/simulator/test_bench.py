"""The laboratory's table."""

import gzip
import json
import math
from pathlib import Path

import pytest

from scheduler_service.sim import bench, drafts
from scheduler_service.sim.costs import StepCosts
from scheduler_service.sim.generate import Synthetic
from scheduler_service.sim.worker import SimFleet


def table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    monkeypatch.setattr("sys.argv", ["bench", *words])
    bench.main()
    return capsys.readouterr().out.splitlines()


def test_a_row_for_each_workload_and_number_of_slots(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--policy", "fcfs,gittins", "--slots", "1,2", "--seeds", "2"]
    head, rule, *rows = table(capsys, monkeypatch, *words, "--workload", "requests=30", "--workload", "requests=20")
    assert head == "| slots | workload | fcfs | gittins |"
    assert rule == "|---|---|---|---|"
    assert [row.split("|")[1:3] for row in rows] == [
        [f" {slots} ", f" requests={n} "] for slots in (1, 2) for n in (30, 20)
    ]
    assert all(row.split("|")[3] == " 1.000 ±0.000 (p99 1.00) " for row in rows)


def test_real_logs_become_jobs_with_their_lengths(tmp_path: Path) -> None:
    path = tmp_path / "logs.jsonl.gz"
    rows = [{"method": "eagle1", "accepted_per_step": [4, 1, 6]}, {"method": "sps", "accepted_per_step": [9]}]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    (log,) = bench.read_logs(path, "eagle1", draft_len=4)
    assert log.accepted == (3, 0, 4)
    assert log.output_tokens == 10
    made = list(bench.drawn([log], Synthetic(requests=3, sigma=math.inf), seed=1))
    assert [job.predicted_output_tokens for job in made] == [10, 10, 10]


def test_the_interval_is_that_of_student() -> None:
    bases = [(1.0, 1.0)] * 3
    assert bench.cell([(0.4, 2.0), (0.5, 2.0), (0.6, 2.0)], bases) == "0.500 ±0.248 (p99 2.00)"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--policy", "nonesuch"], "unknown policy 'nonesuch'"),
        (["--workload", "speed=1"], "'speed' is not a setting"),
        (["--slots", "many"], "'many'"),
        (["--slots", "0"], "0 is not positive"),
        (["--seeds", "0"], "argument --seeds"),
        (["--draft-len", "-3"], "argument --draft-len"),
        (["--kv-budget-tokens", "0"], "argument --kv-budget-tokens"),
        (["--t-resume-ms", "inf"], "argument --t-resume-ms"),
        (["--acceptance", "absent.jsonl"], "absent.jsonl"),
        (["--acceptance", "bad.jsonl"], "bad.jsonl:1: accepted_per_step: must be a list"),
        (["--acceptance", "cut.jsonl.gz"], "ended before"),
    ],
)
def test_a_wrong_flag_is_refused(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"accepted_per_step": [0]}\n')
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"accepted_per_step": [1]}')[:-5])
    with pytest.raises(SystemExit):
        table(capsys, monkeypatch, *words)
    assert complaint in capsys.readouterr().err


def test_chosen_draft_lengths_beat_each_fixed_one_where_verifying_a_token_costs() -> None:
    fleets = [SimFleet(slots=8, draft_len=draft, costs=StepCosts(t_token_ms=1.5)) for draft in (0, 4, 8, None)]
    *fixed, chosen = [mean for mean, _ in drafts.one_seed("gittins", fleets, Synthetic(requests=200), seed=1)]
    assert chosen < min(fixed)
