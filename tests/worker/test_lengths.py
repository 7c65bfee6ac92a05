"""How a probe of remaining length learns, and the command that makes one."""

import gzip
import json
import math
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
import torch

from tests.families.check import save
from tests.families.table import FAMILIES
from tests.worker.harness import Driver, Tiny
from worker_service.distill import probe as probe_making
from worker_service.distill.command import app
from worker_service.distill.data import Sample
from worker_service.distill.lengths import Examples, explained, fit, install
from worker_service.distill.probe import judge
from worker_service.distill.probe import make_probe as make_worth
from worker_service.engine.length_head import BINS, LengthHead, LengthHeadConfig, middle, save_length_head
from worker_service.engine.types import Limits
from worker_service.models import load
from worker_service.probes import find_head, make_probe
from worker_service.prompts import encode

SIZE = 16


def drawn(answers: int, tells: float, seed: int = 1, bound: float = 1e9) -> Examples:
    """Answers whose ln(tokens) have a spread of 1; `tells`: the share of the variance that the first input says."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(answers, SIZE, generator=generator)
    hidden = tells**0.5 * inputs[:, 0] + (1 - tells) ** 0.5 * torch.randn(answers, generator=generator)
    left = (5 + hidden).exp().round().clamp(1, bound)
    return Examples(inputs, left, left == bound, torch.arange(answers))


def read(found: Examples, unseen: Examples) -> torch.Tensor:
    """What a head that learned from `found` reads of others."""
    head = LengthHead(LengthHeadConfig(1, "", "", SIZE, 32))
    later = found._replace(inputs=torch.cat([found.inputs, found.inputs], -1))
    install(head, fit(found), fit(later))
    with torch.inference_mode():
        return middle(head(unseen.inputs, unseen.inputs, torch.ones(len(unseen.left), dtype=torch.bool)))


def test_what_the_state_tells_is_found() -> None:
    unseen = drawn(500, 0.6, seed=2)
    guessed = read(drawn(500, 0.6), unseen)
    assert 0.45 < explained(unseen.left.log().tolist(), guessed.tolist()) < 0.75


def test_where_the_state_tells_nothing_nothing_is_made_up() -> None:
    guessed = read(drawn(300, 0.0), drawn(300, 0.0, seed=2))
    assert float(guessed.std()) < 0.35  # where lengths have a spread of 1


def test_answers_that_were_cut_count_as_longer_ones() -> None:
    cut = drawn(500, 0.0, bound=120)  # more than half of them
    taken_for_whole = cut._replace(cut=torch.zeros_like(cut.cut))
    unseen = drawn(100, 0.0, seed=2)
    assert float((read(cut, unseen) - read(taken_for_whole, unseen)).mean()) > 0.3


def test_an_answer_with_many_positions_weighs_no_more_than_one_with_few() -> None:
    few = drawn(60, 0.0)
    long = few.left > 150
    many = Examples(*(torch.cat([part, *[part[long]] * 20]) for part in few))
    assert float(fit(many).guessed[: len(few.left)].mean() - fit(few).guessed.mean()) == pytest.approx(0, abs=0.15)


def test_where_all_lengths_are_equal_nothing_is_explained() -> None:
    assert explained([4.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]) == explained([1.0, 2.0, 3.0], [0.0] * 3) == 0.0


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit that nobody judges."""
    monkeypatch.setattr("worker_service.distill.lengths.SHRINKAGES", (1.0,))
    monkeypatch.setattr("worker_service.distill.lengths.STEPS", 5)


def test_both_rows_of_a_report_are_of_whole_answers_at_the_same_age(
    quick: None, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load(str(tiny.folder), "cpu", "float32")
    (eos,), random = target.eos_ids, Random(0)
    samples = []
    for number in range(24):
        ids = [random.randrange(200) for _ in range(40 + 5 * number)]
        ids = ids if number % 3 == 0 else [*[token for token in ids if token != eos], eos]  # every third one was cut
        samples.append(Sample(f"{number}", "chat", False, [5, 6], ids))
    judged: list[Sequence[float]] = []

    def explained(true: Sequence[float], guessed: Sequence[float]) -> float:
        judged.append(true)
        return 0.0

    monkeypatch.setattr(probe_making, "explained", explained)
    worth = make_worth(Namespace(work=tmp_path, out=tmp_path / "out"), target, samples, samples)
    assert {each.answers for each in worth.values()} == {16}
    (first, later), held_out = judged[:2], judged[2:]
    assert held_out == [first, later]
    ended = [len(sample.output) for sample in samples if sample.output[-1] == eos]
    assert first == pytest.approx([math.log(length - 1) for length in ended])
    assert later == pytest.approx([math.log(length - 65) for length in ended if length > 65])


def test_a_probe_can_be_made_for_the_text_part_of_a_model_with_vision(quick: None, tmp_path: Path) -> None:
    save(FAMILIES["gemma3 with vision"], tmp_path)
    target, random = load(str(tmp_path), "cpu", "float32"), Random(0)
    outputs = [[random.randrange(160) for _ in range(random.randint(20, 90))] for _ in range(12)]
    samples = [Sample(f"{number}", "chat", False, [5, 6], output) for number, output in enumerate(outputs)]
    options = Namespace(work=tmp_path, out=tmp_path / "out", max_tokens=90)
    make_worth(options, target, samples, samples)
    head = find_head(str(options.out), target)
    assert head
    assert judge(options, target, head, samples).exists()


def test_too_few_answers_are_refused() -> None:
    with pytest.raises(ValueError, match="too few answers"):
        fit(drawn(3, 0.5))


def test_bins_cover_all_lengths() -> None:
    one = drawn(50, 0.5)._replace(left=torch.tensor([1.0, 10.0**7] * 25))
    assert torch.isfinite(fit(one).guessed).all()
    assert float(fit(one).guessed.max()) <= BINS


def test_the_command_makes_a_probe_that_a_worker_takes(tiny: Tiny, tmp_path: Path) -> None:
    words = ("quick", "brown", "fox", "lazy", "dog", "queue", "request", "short", "long", "tail")
    rows = [{"prompt": f"The {a} {b}"} for a in words for b in words if a < b]
    with gzip.open(tmp_path / "chat.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    out = tmp_path / "probe"
    flags = f"--target {tiny.folder} --prompts {tmp_path / 'chat.jsonl.gz'} --out {out} --probe --device cpu"
    small = "--tokens 1200 --batch 8 --max-tokens 40 --threads 1"
    app([*flags.split(), *small.split()], standalone_mode=False)
    target = load(str(tiny.folder), "cpu", "float32")
    probe = make_probe(str(out), target)
    driver = Driver(tiny.engine(probe=probe))
    driver.admit("a", tiny.prompt("The quick"), Limits(50, ignore_eos=True))
    driver.finish_all()
    assert [row.remaining is not None for row in driver.rows if row.start == 0] == [True]
    assert set(json.loads((out / "report.json").read_text())) == {"learned", "held out"}

    app(
        [*flags.replace(str(out), str(tmp_path / "judged")).split(), *small.split(), "--judge", str(out)],
        standalone_mode=False,
    )
    rows = [json.loads(line) for line in (tmp_path / "judged" / "judged.jsonl").read_text().splitlines()]
    row = max(rows, key=lambda row: row["output_tokens"])
    driver = Driver(tiny.engine(probe=make_probe(str(out), target)))
    driver.admit("b", row["prompt_ids"], Limits(row["output_tokens"], ignore_eos=True))
    driver.finish_all(lambda round_: 0)
    read = {row.remaining.after: row.remaining.chances for row in driver.rows if row.remaining}
    assert [after for after, _ in row["readings"]] == list(read)
    for after, tokens in row["readings"]:
        weights = [math.exp(-q / 16) for q in read[after]]
        told = math.log(2) * sum(w * (k + 0.5) for k, w in enumerate(weights)) / sum(weights)
        assert math.log(tokens) == pytest.approx(told, abs=0.05)  # of rounding, on both ways


def test_answers_to_other_prompts_are_others(tiny: Tiny, tmp_path: Path) -> None:
    target = load(str(tiny.folder), "cpu", "float32")
    size = target.model.config.hidden_size
    save_length_head(LengthHead(LengthHeadConfig(1, "tiny", target.fingerprint, size, 32)), tmp_path / "probe")
    for name in ("quick", "lazy"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": f"The {name}"}))
        flags = f"--target {tiny.folder} --prompts {tmp_path / name}.jsonl --out {tmp_path / 'out'} --device cpu"
        app(f"{flags} --judge {tmp_path / 'probe'} --max-tokens 4 --threads 1".split(), standalone_mode=False)
        (row,) = map(json.loads, (tmp_path / "out" / "judged.jsonl").read_text().splitlines())
        assert row["prompt_ids"] == encode(tiny.tokenizer, f"The {name}")


def test_only_a_probe_of_these_weights_is_judged(tiny: Tiny, tmp_path: Path) -> None:
    save_length_head(LengthHead(LengthHeadConfig(1, "another", "of others", SIZE, 32)), tmp_path / "probe")
    flags = f"--target {tiny.folder} --prompts {tmp_path / 'none'} --out {tmp_path / 'out'} --device cpu --judge"
    for name, told in ((f"{tmp_path / 'probe'}", "these are not its weights"), ("default", "there is no such probe")):
        with pytest.raises(SystemExit, match=told):
            app([*flags.split(), name], standalone_mode=False)
