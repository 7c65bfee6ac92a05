"""The trial of a probe on judged answers: what it finds where readings tell, and where they tell nothing."""

import json
import math
from pathlib import Path
from random import Random

import pytest

from laps_sd import probe_trial


def rows(noise: float, count: int = 240) -> list[dict[str, object]]:
    """Answers whose ln(tokens) have a spread of 1, and whose readings err by `noise`."""
    rng, made = Random(3), []
    for _ in range(count):
        tokens = max(2, round(math.exp(rng.gauss(5, 1))))
        ages = [after for after in (1, 64) if after < tokens]
        told = [[after, (tokens - after) * math.exp(rng.gauss(0, noise))] for after in ages]
        made.append(
            {"output_tokens": tokens, "max_tokens": 4096, "prompt_tokens": 2, "prompt_ids": [7, 8], "readings": told}
        )
    return made


def test_readings_that_tell_explain_and_their_intervals_hold() -> None:
    found = probe_trial.trial(rows(0.5))
    for after in probe_trial.AGES:
        assert probe_trial.explained(found[after, "words"]) < 0.2
        assert probe_trial.explained(found[after, "words and probe"]) > 0.5
    assert 0.7 < probe_trial.covered(found[1, "words and probe"]) < 0.9


def test_readings_that_tell_nothing_change_nothing() -> None:
    found = probe_trial.trial(rows(30.0))
    assert found[1, "words"] == found[1, "words and probe"]


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "judged.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows(0.5, 40)))
    monkeypatch.setattr("sys.argv", ["probe_trial", str(file), "--orders", "2"])
    return file


def test_the_command_prints_a_table(judged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    probe_trial.main()
    assert "|1|words and probe|20|" in capsys.readouterr().out


@pytest.mark.parametrize("count", [0, 1])
def test_where_no_answer_is_so_long_nothing_is_said(
    count: int, judged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = rows(0.5, 1)[0] | {"output_tokens": 5, "readings": [[1, 3.0]]}
    judged.write_text(count * (json.dumps(row) + "\n"))
    probe_trial.main()
    told = capsys.readouterr().out
    assert "|64|" not in told
    assert ("|1|words|1|0.00|" in told) == (count > 0)


def test_rows_without_readings_and_no_orders_are_refused(
    judged: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["probe_trial", str(judged), "--orders", "0"])
    with pytest.raises(SystemExit):
        probe_trial.main()
    judged.write_text('{"output_tokens": 5}')
    monkeypatch.setattr("sys.argv", ["probe_trial", str(judged)])
    with pytest.raises(SystemExit):
        probe_trial.main()
    told = capsys.readouterr().err
    assert "--orders: at least one" in told
    assert "a row needs max_tokens, output_tokens" in told
