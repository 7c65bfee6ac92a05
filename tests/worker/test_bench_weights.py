"""The bench over kinds of weights: all of them answer the same prompts, and perplexity is what transformers says."""

import json
from pathlib import Path

import pytest
import torch
import typer

from tests.worker.harness import Tiny
from worker_service.bench.race import Answer, Rounds
from worker_service.bench.weights import app, compare, perplexity

TEXT = "The quick brown fox jumps over the lazy dog, and once upon a time there was a queue. " * 9


def test_perplexity_is_that_of_transformers(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_service.bench.weights._WINDOW", 50)
    model = type(tiny.model).from_pretrained(tiny.folder).eval()
    ids = tiny.prompt(TEXT)[:120]
    nats, count = 0.0, 0
    with torch.inference_mode():
        for window in (ids[:50], ids[50:100], ids[100:]):
            nats += float(model(torch.tensor([window]), labels=torch.tensor([window])).loss) * (len(window) - 1)
            count += len(window) - 1
    expected = float(torch.tensor(nats / count).exp())
    assert perplexity(tiny.engine(), ids) == pytest.approx(expected, rel=1e-3)


def test_one_token_has_no_perplexity(tiny: Tiny) -> None:
    with pytest.raises(ValueError, match="less than two tokens"):
        perplexity(tiny.engine(), [3])


def test_speeds_are_of_rounds_without_prefill_and_ratios_of_the_same_prompts() -> None:
    def answers(*seconds: float) -> list[Answer]:
        return [Answer([], 99.0, Rounds(tokens=12, verify_s=each)) for each in seconds]

    found = compare({"auto": answers(3.0, 6.0), "int8": answers(2.0, 2.0)})
    assert found["auto"].ratios == [1.0, 1.0]
    assert found["int8"].tokens_per_s == [6.0, 6.0]
    assert found["int8"].ratios == [1.5, 3.0]


def bench(tiny: Tiny, text: Path, *flags: str) -> None:
    common = ["--model", str(tiny.folder), "--text", str(text), "--dtype", "float32", "--threads", "1"]
    app([*common, "--tokens", "4", "--repetitions", "2", "--batch", "1,2", *flags], standalone_mode=False)


def test_every_kind_has_a_row_and_fewer_bytes(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text(TEXT)
    bench(tiny, tmp_path / "text", "--weights", "auto,int8,int4", "--json", str(tmp_path / "record"))
    found = json.loads((tmp_path / "record").read_text())
    assert list(found) == ["auto", "int8", "int4"]
    assert found["auto"]["megabytes"] > 2 * found["int8"]["megabytes"] > 2 * found["int4"]["megabytes"]
    assert found["int8"]["perplexity"] == pytest.approx(found["auto"]["perplexity"], rel=0.05)
    for kind in found.values():
        assert {size: len(speed["tokens_per_s"]) for size, speed in kind["speeds"].items()} == {"1": 2, "2": 2}
    assert "tokens/s at batch 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--weights", "int3"], "'int3' is none of auto, int8, int4, stored"),
        (["--batch", "1,x"], "'1,x' is not a list of batch sizes"),
        (["--json", "/nowhere/record"], "cannot be written"),
    ],
)
def test_what_cannot_be_is_a_sentence(tiny: Tiny, tmp_path: Path, flags: list[str], problem: str) -> None:
    with pytest.raises(typer.BadParameter, match=problem):
        bench(tiny, tmp_path / "text", *flags)


def test_a_text_that_is_not_there_is_a_sentence(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"bench of weights: .*No such file"):
        bench(tiny, tmp_path / "nothing")


def test_a_text_that_is_too_short_is_refused_before_anything_runs(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("")
    monkeypatch.setattr("worker_service.bench.weights.race", None)
    with pytest.raises(SystemExit, match="less than two tokens"):
        bench(tiny, tmp_path / "text")
