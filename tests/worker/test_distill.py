"""Distillation on the tiny model: its halves go on where they were, its head learns, its figures are the engine's."""

import copy
import gc
import gzip
import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from rich.progress import Progress
from transformers import GPT2Config, GPT2LMHeadModel

from tests.worker.harness import Driver, Tiny
from tests.worker.pretended import pretended
from worker_service.distill import work
from worker_service.distill.command import app
from worker_service.distill.data import Sample, generate, read_samples
from worker_service.distill.evaluate import measure
from worker_service.distill.train import Features, Trainer, batches, draft_vocabulary, initialise, last_states, train
from worker_service.distill.work import _train
from worker_service.drafters import make_drafter
from worker_service.engine.drafting.drafter import ALL, NoDrafter
from worker_service.engine.drafting.head import DraftHead, DraftHeadConfig
from worker_service.engine.drafting.head_drafter import HeadDrafter
from worker_service.engine.drafting.ngram import NgramDrafter
from worker_service.engine.types import Limits
from worker_service.model_files import ModelError
from worker_service.models import LoadedModel, load
from worker_service.prompts import Prompt, PromptError, read_prompts

WORDS = ("quick", "brown", "fox", "lazy", "dog", "queue", "request", "short", "long", "tail", "token", "draft", "text")
PROMPTS = [f"The {a} {b}" for a in WORDS for b in WORDS if a < b]


class Interrupted(Exception):
    pass


def written(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    file = folder / name
    with gzip.open(file, "wt") if name.endswith(".gz") else file.open("w") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
    return file


def answers(
    tiny: Tiny,
    file: Path,
    tokens: int,
    interrupt_after: int | None = None,
    encode: Callable[[str], list[int]] | None = None,
) -> list[Sample]:
    def progress(done: int) -> None:
        if interrupt_after is not None and done >= interrupt_after:
            raise Interrupted

    prompts = read_prompts([written(file.parent, "chat.jsonl", [{"prompt": text} for text in PROMPTS])])
    return generate(
        tiny.engine(drafter=NoDrafter()),
        encode or tiny.prompt,
        prompts,
        file,
        tokens=tokens,
        batch=8,
        max_tokens=24,
        temperature=0.7,
        max_prompt_tokens=64,
        progress=progress,
    )


@pytest.fixture(scope="module")
def samples(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    return answers(tiny, tmp_path_factory.mktemp("samples") / "samples.jsonl", 2000)


def test_categories_and_sources_take_turns_and_excluded_prompts_are_left_out(tmp_path: Path) -> None:
    chat = [{"prompt": f"chat {i}", "source": "a" if i else "b"} for i in range(3)]
    code = [{"prompt": "code 0"}, {"prompt": "code  0"}, {"prompt": "a test"}]
    files = [written(tmp_path, "chat.jsonl.gz", chat), written(tmp_path, "code.jsonl", code)]
    prompts = read_prompts(files, exclude=[written(tmp_path, "test.jsonl", [{"prompt": "a  test"}])])
    assert [prompt.category for prompt in prompts] == ["chat", "code", "chat", "chat"]
    assert {prompt.text for prompt in prompts[:3:2]} > {"chat 0"}  # the rare source is among the first two


@pytest.mark.parametrize("row", ["[]", '{"text": "x"}', '{"prompt": 3}', "{", '{"prompt": "\\ud800"}', "[" * 100_000])
def test_prompts_that_are_none_are_refused_by_file_and_line(row: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(row + "\n")
    with pytest.raises(PromptError, match=r"bad\.jsonl"):
        read_prompts([file])


def test_prompts_whose_file_ends_too_early_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "chat.jsonl.gz", [{"prompt": "a"}])
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(PromptError, match=r"chat\.jsonl\.gz: .*end"):
        read_prompts([file])


def test_an_interrupted_generation_goes_on_to_the_same_answers(
    tiny: Tiny, samples: list[Sample], tmp_path: Path
) -> None:
    file = tmp_path / "samples.jsonl"
    with pytest.raises(Interrupted):
        answers(tiny, file, 2000, interrupt_after=600)
    file.write_text(file.read_text()[:-20])  # the last line was being written
    known = read_samples(file)
    assert known
    again = answers(tiny, file, 2000)
    assert again[: len(known)] == known
    assert len({sample.id for sample in again}) == len(again)
    whole = {sample.id: sample for sample in samples}
    same = [sample for sample in again if sample.id in whole]
    assert len(same) > len(samples) // 2
    assert all(sample == whole[sample.id] for sample in same)


def test_a_line_that_is_no_answer_costs_none_of_those_behind_it(samples: list[Sample], tmp_path: Path) -> None:
    lines = [json.dumps(asdict(sample)) for sample in samples[:4]]
    (tmp_path / "samples.jsonl").write_text("\n".join([lines[0], lines[1][:30], "7", *lines[2:]]) + "\n")
    assert read_samples(tmp_path / "samples.jsonl") == [samples[0], *samples[2:4]]


def test_answers_that_end_with_an_error_are_not_learned_from(tiny: Tiny, tmp_path: Path) -> None:
    file, none = tmp_path / "samples.jsonl", 10**9  # no token of the model's
    some = answers(tiny, file, 200, encode=lambda text: [none] if "fox" in text else tiny.prompt(text))
    assert all(sample.output and none not in sample.prompt for sample in some)
    assert read_samples(file) == some
    with pytest.raises(ModelError, match=f"{none} is not in the vocabulary"):
        answers(tiny, tmp_path / "none.jsonl", 200, encode=lambda text: [none])


def test_prompts_are_held_out_whatever_the_run() -> None:
    prompts = [Prompt(f"{i:04x}", "chat", "") for i in range(320)]
    assert sum(prompt.held_out for prompt in prompts) == 10
    assert not any(prompt.sampled for prompt in prompts if prompt.held_out)


def trained(
    tiny: Tiny, samples: list[Sample], folder: Path, passes: int, interrupt_after: int | None = None, **other: Any
) -> DraftHead:
    options = {"unroll": 2, "learning_rate": 3e-3, "batch_tokens": 200} | other
    torch.manual_seed(0)
    config = tiny.model.config
    features = Features(folder / "features.bin", samples, config.hidden_size)
    features.compute(tiny.model, samples, lambda done, total: None)
    ids = draft_vocabulary(samples, 256)
    head = DraftHead(DraftHeadConfig("tiny", "", config.hidden_size, config.intermediate_size, len(ids)))
    head.draft_ids.copy_(torch.tensor(ids))
    initialise(head, tiny.model)
    embeddings = tiny.model.get_input_embeddings().weight.detach().bfloat16()
    trainer = Trainer(head, embeddings, embeddings, unroll=options["unroll"], learning_rate=options["learning_rate"])

    def progress(done: int, total: int, loss: float) -> None:
        if done == interrupt_after:
            trainer.save(folder / "checkpoint.pt")
            raise Interrupted

    checkpoint = folder / "checkpoint.pt"
    batch_tokens = options["batch_tokens"]
    train(trainer, samples, features, checkpoint, passes=passes, batch_tokens=batch_tokens, progress=progress)
    return head


def test_an_interrupted_training_goes_on_to_the_same_head(tiny: Tiny, samples: list[Sample], tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = trained(tiny, samples, tmp_path / "whole", passes=2)
    with pytest.raises(Interrupted):
        trained(tiny, samples, tmp_path / "parts", passes=2, interrupt_after=7)
    parts = trained(tiny, samples, tmp_path / "parts", passes=2)
    assert all(torch.equal(weight, parts.state_dict()[name]) for name, weight in whole.state_dict().items())


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"learning_rate": 1e-3}, "--learning-rate 0.003;"),
        ({"unroll": 1}, "--unroll 2;"),
        ({"passes": 1, "batch_tokens": 100}, "--passes 2 and --batch-tokens 200;"),
    ],
)
def test_a_head_that_was_trained_with_other_options_is_not_taken_for_one_with_these(
    other: dict[str, Any], told: str, tiny: Tiny, samples: list[Sample], tmp_path: Path
) -> None:
    trained(tiny, samples[:9], tmp_path, passes=2)
    with pytest.raises(ModelError, match=told):
        trained(tiny, samples[:9], tmp_path, **({"passes": 2} | other))


def test_a_head_that_learned_from_other_answers_is_not_taken_for_one_of_these(
    tiny: Tiny, samples: list[Sample], tmp_path: Path
) -> None:
    """More of them are learned from in another order, of which nobody knows what is done."""
    trained(tiny, samples[:9], tmp_path, passes=2)
    for others in (samples[:10], samples[1:10]):
        with pytest.raises(ModelError, match="was trained with other answers; remove it"):
            trained(tiny, others, tmp_path, passes=2)


def test_a_checkpoint_that_tells_no_options_is_given_none(tiny: Tiny, samples: list[Sample], tmp_path: Path) -> None:
    """Older versions made such ones."""
    checkpoint = tmp_path / "checkpoint.pt"
    before = trained(tiny, samples[:9], tmp_path, passes=1)
    content = torch.load(checkpoint, weights_only=True)
    del content["options"]
    torch.save(content, checkpoint)
    for rate in (1e-3, 3e-3):
        same = trained(tiny, samples[:9], tmp_path, passes=1, learning_rate=rate)
        assert torch.equal(same.join.weight, before.join.weight)


def test_a_head_learns_on_in_more_passes(tiny: Tiny, samples: list[Sample], tmp_path: Path) -> None:
    before, after = (trained(tiny, samples[:9], tmp_path, passes=passes) for passes in (1, 2))
    assert not torch.equal(before.join.weight, after.join.weight)


def test_what_the_target_knows_is_of_these_answers_and_no_others(
    tiny: Tiny, samples: list[Sample], tmp_path: Path
) -> None:
    """The file of answers may be made anew, in another order."""

    def known(file: str, samples: list[Sample]) -> tuple[list[torch.Tensor], int]:
        features, computed = Features(tmp_path / file, samples, tiny.model.config.hidden_size), 0

        def count(model: Any, tokens: torch.Tensor) -> torch.Tensor:
            nonlocal computed
            computed += 1
            return last_states(model, tokens)

        features.compute(tiny.model, samples, lambda done, total: None, count)
        return [features.of(i, 0) for i in range(len(samples))], computed

    first, *others, last = samples[:4]
    known("features.bin", [first, *others])
    assert known("features.bin", [first, *others, last])[1] == 1
    rows, computed = known("features.bin", [first, last, *others])
    assert computed == 3
    expected, _ = known("anew.bin", [first, last, *others])
    assert all(torch.equal(row, other) for row, other in zip(rows, expected, strict=True))


def test_a_head_learns_and_its_figures_are_those_of_the_engine(
    tiny: Tiny, samples: list[Sample], tmp_path: Path
) -> None:
    greedy = [sample for sample in samples if not Prompt(sample.id, "", "").sampled]
    head = trained(tiny, greedy, tmp_path, passes=40)
    table = tiny.model.get_input_embeddings().weight.detach()
    features = Features(tmp_path / "features.bin", greedy, table.shape[1])
    index = {sample.id: i for i, sample in enumerate(greedy)}

    def hidden(sample: Sample) -> torch.Tensor:
        return features.of(index[sample.id], len(sample.prompt) - 1).float()

    with torch.inference_mode():
        figures = measure(HeadDrafter(head, table, table, price=ALL), greedy, hidden)["chat"]
        ngram = measure(NgramDrafter(), greedy, hidden)["all"]
    assert figures.per_drafted(1) > 0.3
    assert figures.per_round(3) > ngram.per_round(3)
    assert figures.by_position == sorted(figures.by_position, reverse=True)

    driver = Driver(tiny.engine(drafter=HeadDrafter(head, table, table, price=ALL)))
    for sample in greedy:
        driver.admit(sample.id, sample.prompt, Limits(max_tokens=24))
    driver.finish_all(draft_len=lambda n: 3)
    drafted, accepted = (sum(getattr(row, name) for row in driver.rows) for name in ("drafted", "accepted"))
    assert accepted / drafted == pytest.approx(figures.per_drafted(3), abs=0.01)  # its last token is never drafted
    assert accepted / drafted > 0.2


def test_a_head_for_a_target_on_a_gpu_is_trained_on_the_cpu(tiny: Tiny, samples: list[Sample], tmp_path: Path) -> None:
    config = tiny.model.config
    head = DraftHead(DraftHeadConfig("tiny", "", config.hidden_size, config.intermediate_size, 2))
    head.draft_ids.copy_(torch.tensor([5, 7]))
    options = Namespace(work=tmp_path, unroll=2, learning_rate=1e-3, passes=1, batch_tokens=40)
    with pretended():
        target: Any = SimpleNamespace(model=copy.deepcopy(tiny.model).to("cuda:0"))
        bar, known = Progress(disable=True), target.model.get_input_embeddings()
        _train(options, target, samples[:4], bar, Trainer, head, lambda _, tokens: known(tokens), "features.bin")
    assert (tmp_path / "checkpoint.pt").exists()


def test_the_command_makes_a_drafter_that_serves(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = written(tmp_path, "chat.jsonl", [{"prompt": text} for text in PROMPTS])
    tests = written(tmp_path, "test.jsonl", [{"prompt": text, "kind": "code"} for text in PROMPTS[:6]])
    flags = f"--target {tiny.folder} --prompts {prompts} --test {tests} --out {tmp_path / 'out'} --tokens 600"
    small = "--test-tokens 90 --max-tokens 16 --passes 2 --batch-tokens 100 --race 2 --threads 1 --draft-tokens 300"
    models = WeakSet[Any]()

    def loaded(*args: Any) -> LoadedModel:
        found = load(*args)
        models.add(found.model)
        return found

    def no_race(*args: Any, **options: Any) -> None:
        gc.collect()
        assert len(models) == 2  # as while it generated: a large target may have no third place
        raise Interrupted

    monkeypatch.setattr(work, "load", loaded)
    with monkeypatch.context() as patched:
        patched.setattr(work, "compare", no_race)
        with pytest.raises(Interrupted):
            app([*flags.split(), *small.split()], standalone_mode=False)
    acceptance = json.loads((tmp_path / "out" / "report.json").read_text())["acceptance"]
    told = capsys.readouterr()
    assert "accepted per drafted token" in told.out
    assert "serve with it" in told.err
    app([*flags.split(), *small.split()], standalone_mode=False)
    learned = {sample.id for sample in read_samples(tmp_path / "out.work" / "samples.jsonl")}
    (file,) = (tmp_path / "out.work").glob("test-*.jsonl")
    judges = {sample.id for sample in read_samples(file)}
    assert learned
    assert judges
    assert not learned & judges
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["acceptance"] == acceptance
    assert set(acceptance["default"]) == {"all", "code"}
    assert report["speed"]["none"]["tokens_per_round"] == 1
    assert "one request at a time" in capsys.readouterr().out
    target = load(str(tiny.folder), "cpu", "float32")
    assert make_drafter(str(tmp_path / "out"), target, blocks=1, block_tokens=1)


def refused(tmp_path: Path, target: Path, *words: str) -> str:
    """Why the command ends before it makes anything."""
    prompts = written(tmp_path, "chat.jsonl", [{"prompt": "The fox"}])
    flags = f"--target {target} --prompts {prompts} --out {tmp_path / 'out'}"
    with pytest.raises(SystemExit) as ended:
        app([*flags.split(), *words], standalone_mode=False)
    return str(ended.value)


@pytest.mark.parametrize("words", [(), ("--judge", "default")])
def test_a_work_folder_of_another_target_is_not_gone_on_in(words: tuple[str, ...], tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "out.work").mkdir()
    (tmp_path / "out.work" / "about.json").write_text('{"target": "another"}')
    (tmp_path / "out.work" / "samples.jsonl").write_text("{}\n")
    assert "out.work holds samples of another target" in refused(tmp_path, tiny.folder, *words)


def test_a_work_folder_without_answers_is_anybodys(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "out.work").mkdir()
    (tmp_path / "out.work" / "about.json").write_text('{"target": "another"}')
    (tmp_path / "out.work" / "samples.jsonl").touch()
    assert "none.jsonl" in refused(tmp_path, tiny.folder, "--prompts", str(tmp_path / "none.jsonl"))
    assert json.loads((tmp_path / "out.work" / "about.json").read_text())["max_tokens"] == 256


def test_a_folder_that_cannot_be_made_is_told_before_the_work(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    assert refused(tmp_path, tiny.folder) == f"distill: {tmp_path / 'out'}: File exists"
    assert not (tmp_path / "out.work").exists()


def test_what_the_work_folder_is_of_must_be_readable(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "out.work").mkdir()
    (tmp_path / "out.work" / "about.json").write_text('{"target": "cut')
    (tmp_path / "out.work" / "samples.jsonl").write_text("{}\n")
    assert "about.json: Unterminated string" in refused(tmp_path, tiny.folder)


def test_prompts_that_are_all_for_the_test_leave_none_to_learn_from(tiny: Tiny, tmp_path: Path) -> None:
    tests = written(tmp_path, "test.jsonl", [{"prompt": "The fox"}])
    assert "no prompts but those of --test" in refused(tmp_path, tiny.folder, "--test", str(tests))


def test_what_was_learned_from_is_not_judged_by(tiny: Tiny, tmp_path: Path) -> None:
    tests = written(tmp_path, "test.jsonl", [{"prompt": "The fox"}, {"prompt": "The dog"}])
    (prompt, _) = read_prompts([tests])
    (tmp_path / "out.work").mkdir()
    written(tmp_path / "out.work", "samples.jsonl", [asdict(Sample(prompt.id, "chat", False, [1], [2, 3]))])
    assert "to 1 prompts of --test" in refused(tmp_path, tiny.folder, "--test", str(tests))


def test_a_target_of_another_form_is_refused_before_anything_is_made(tiny: Tiny, tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=tiny.model.config.vocab_size, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tiny.tokenizer.save_pretrained(tmp_path / "gpt2")
    assert "a gpt2 model has other parts" in refused(tmp_path, tmp_path / "gpt2")
    assert not (tmp_path / "out.work").exists()


def test_what_makes_no_whole_batch_is_learned_from_if_there_is_nothing_else() -> None:
    samples = [Sample(str(number), "chat", False, [1], [2, 3]) for number in range(3)]
    assert [sorted(batch) for batch in batches(samples, 100, 0)] == [[0, 1, 2]]
    assert [len(batch) for batch in batches(samples, 4, 0)] == [2]


def test_long_prompts_make_smaller_batches_where_they_are_learned_from() -> None:
    samples = [Sample(str(number), "chat", False, [1] * 50, [2, 3]) for number in range(12)]
    assert [len(batch) for batch in batches(samples, 20, 0)] == [10]
    assert [len(batch) for batch in batches(samples, 20, 0, most=160)] == [4, 4, 4]
