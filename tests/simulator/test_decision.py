"""The bench of one decision: what it counts, and its flags. How long one takes is not for a test to say."""

import json
from pathlib import Path

import pytest

from scheduler_service.core.policies import make_policy
from scheduler_service.core.types import Plan
from scheduler_service.sim import decision


def test_as_many_wait_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    live: list[int] = []

    class Watched(decision.Core):
        def plan(self, name: str) -> Plan:
            live.append(len(self.fleet.entries))
            return super().plan(name)

    monkeypatch.setattr(decision, "Core", Watched)
    assert len(decision.decisions(make_policy("gittins"), waiting=50, slots=4, steps=200, seed=1)) == 200
    assert live[0] == 54
    assert min(live) >= 50  # who just ended is replaced after the decision


def test_it_writes_a_row_for_each_policy_and_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "out.json"
    words = ["--policy", "fcfs,laps-sd:key=remaining", "--waiting", "5,20", "--decisions", "10", "--json", str(path)]
    monkeypatch.setattr("sys.argv", ["decision", *words])
    decision.main()
    results = json.loads(path.read_text())["policies"]
    assert [list(results[name]) for name in ("fcfs", "laps-sd:key=remaining")] == [["5", "20"]] * 2
    assert all(
        0 < row["p50_ms"] <= row["p99_ms"] <= row["max_ms"] for rows in results.values() for row in rows.values()
    )
    assert len(capsys.readouterr().out.splitlines()) == 2 + 4


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--policy", "nonesuch"], "unknown policy 'nonesuch'"),
        (["--waiting", "many"], "'many'"),
        (["--slots", "0"], "must be at least 1"),
    ],
)
def test_a_wrong_flag_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], complaint: str
) -> None:
    monkeypatch.setattr("sys.argv", ["decision", *words])
    with pytest.raises(SystemExit):
        decision.main()
    assert complaint in capsys.readouterr().err
