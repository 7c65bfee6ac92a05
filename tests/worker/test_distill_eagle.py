"""`laps-sd distill --kind eagle3` on the tiny model: it trains what will be drafted with, goes on where it was, learns,
and leaves a folder that serves."""

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.worker.eagles import Reference
from tests.worker.harness import Driver, Tiny
from tests.worker.test_distill import PROMPTS, Interrupted, answers, written
from worker_service.distill.command import app
from worker_service.distill.data import Sample
from worker_service.distill.eagle import EagleTrainer, _Chains, new_eagle, states
from worker_service.distill.evaluate import measure
from worker_service.distill.train import Features, draft_vocabulary, last_states, train
from worker_service.drafters import eagle_drafter, make_drafter, vocabulary_digest
from worker_service.engine.drafting.drafter import ALL, FirstOf
from worker_service.engine.drafting.eagle import EagleHead, load_eagle, save_eagle
from worker_service.engine.types import Limits
from worker_service.model_files import is_eagle
from worker_service.models import load
from worker_service.prompts import Prompt


@pytest.fixture(scope="module")
def samples(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    every = answers(tiny, tmp_path_factory.mktemp("samples") / "samples.jsonl", 1500)
    return [sample for sample in every if not Prompt(sample.id, "", "").sampled and len(sample.output) > 1]


def trained(
    tiny: Tiny, samples: list[Sample], folder: Path, passes: int, interrupt_after: int | None = None
) -> EagleHead:
    torch.manual_seed(0)
    head = new_eagle(tiny.model, draft_vocabulary(samples, 256), vocabulary_digest(tiny.tokenizer))
    features = Features(folder / "features.bin", samples, 4 * tiny.model.config.hidden_size)
    features.compute(tiny.model, samples, lambda done, total: None, states)
    table = tiny.model.get_input_embeddings().weight.detach().bfloat16()
    trainer = EagleTrainer(head, table, table, unroll=3, learning_rate=3e-3)

    def progress(done: int, total: int, loss: float) -> None:
        if done == interrupt_after:
            trainer.save(folder / "checkpoint.pt")
            raise Interrupted

    train(trainer, samples, features, folder / "checkpoint.pt", passes=passes, batch_tokens=200, progress=progress)
    return head


def test_chains_that_are_trained_are_those_that_draft(tiny: Tiny, tmp_path: Path) -> None:
    text = tiny.prompt("A short request overtakes a long one, and nobody waits.")
    torch.manual_seed(0)
    save_eagle(new_eagle(tiny.model, range(50), ""), tmp_path)
    head, reference = load_eagle(tmp_path), Reference(tmp_path, tiny.model)
    n, table = len(text) - 3, tiny.model.get_input_embeddings().weight
    begin = 2  # chains before it have one step
    with torch.inference_mode():
        fused = head.fc(states(tiny.model, torch.tensor(text[:n]))[:, :-64])
        attend, positions = _Chains([n], [n - begin]), torch.arange(n)
        chain = [head(fused, table[torch.tensor(text[1:][:n])], positions, attend)[begin:]]
        for j in (1, 2):
            embeds = table[torch.tensor(text[j + 1 :][begin:n])]
            chain.append(head(chain[-1], embeds, positions[begin:] + j, attend))
        for i in (begin, 5, n - 1):
            for j in range(3):
                entries = torch.cat([fused[: i + 1], *(each[i - begin][None] for each in chain[:j])])
                expected = reference._layer(entries, text[1 : i + j + 2])[-1]
                torch.testing.assert_close(chain[j][i - begin], expected, atol=1e-4, rtol=1e-3)


class Largest(TorchDispatchMode):
    numbers = 0  # of any tensor that was made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


def test_texts_of_a_batch_know_nothing_of_each_other(tiny: Tiny, tmp_path: Path) -> None:
    """And need no memory for it: prompts may be long and a batch may have many."""
    random = Random(0)
    texts = [[random.randrange(200) for _ in range(48)] for _ in range(32)]
    samples = [Sample(f"{number}", "chat", False, text[:40], text[40:]) for number, text in enumerate(texts)]
    features = Features(tmp_path / "features.bin", samples, 4 * tiny.model.config.hidden_size)
    features.compute(tiny.model, samples, lambda done, total: None, states)
    torch.manual_seed(0)
    head = new_eagle(tiny.model, draft_vocabulary(samples, 64), "")
    table = tiny.model.get_input_embeddings().weight.detach().bfloat16()
    trainer = EagleTrainer(head, table, table, unroll=3, learning_rate=3e-3)

    def loss(indices: Sequence[int]) -> float:
        return float(trainer._loss(trainer.make_batch(samples, features, indices))[1].detach())

    with Largest() as largest:
        together = loss(range(32))
    assert together == pytest.approx(sum(loss([i]) for i in range(32)) / 32, rel=1e-3)
    assert largest.numbers < (32 * 47) ** 2


def test_an_interrupted_training_goes_on_to_the_same_head(tiny: Tiny, samples: list[Sample], tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    whole = trained(tiny, samples, tmp_path / "whole", 1)
    with pytest.raises(Interrupted):
        trained(tiny, samples, tmp_path / "parts", 1, interrupt_after=2)
    parts = trained(tiny, samples, tmp_path / "parts", 1)
    assert all(torch.equal(weight, parts.state_dict()[name]) for name, weight in whole.state_dict().items())


def test_a_head_learns_and_its_figures_are_those_of_the_engine(
    tiny: Tiny, samples: list[Sample], tmp_path: Path
) -> None:
    target = load(str(tiny.folder), "cpu", "float32")
    figures = []
    for passes in (0, 8):
        (tmp_path / str(passes)).mkdir()
        head = trained(tiny, samples, tmp_path / str(passes), passes)
        drafter = eagle_drafter(head, target, blocks=64, block_tokens=16, price=ALL)

        def known(sample: Sample) -> torch.Tensor:
            return torch.tensor((sample.prompt + sample.output)[:-1])

        with torch.inference_mode():
            figures.append(
                measure(
                    drafter,
                    samples[:15],
                    lambda sample: last_states(tiny.model, known(sample))[len(sample.prompt) - 1 :],
                    states=lambda sample: states(tiny.model, known(sample))[:, :-64],
                )["all"]
            )
    before, after = figures
    assert after.per_drafted(1) > max(0.3, 1.5 * before.per_drafted(1))

    driver = Driver(tiny.engine(drafter=drafter))
    for sample in samples[:15]:
        driver.admit(sample.id, sample.prompt, Limits(max_tokens=24))
    driver.finish_all(draft_len=lambda n: 3)
    drafted, accepted = (sum(getattr(row, name) for row in driver.rows) for name in ("drafted", "accepted"))
    assert accepted / drafted == pytest.approx(after.per_drafted(3), abs=0.02)  # its last token is never drafted


def test_the_command_makes_a_head_in_the_public_format(tiny: Tiny, tmp_path: Path) -> None:
    prompts = written(tmp_path, "chat.jsonl", [{"prompt": text} for text in PROMPTS])
    tests = written(tmp_path, "test.jsonl", [{"prompt": text} for text in PROMPTS[:6]])
    out = tmp_path / "out"
    flags = f"--kind eagle3 --target {tiny.folder} --prompts {prompts} --test {tests} --out {out} --tokens 400"
    small = "--test-tokens 60 --max-tokens 16 --passes 1 --batch-tokens 100 --race 1 --threads 1 --draft-tokens 300"
    app([*flags.split(), *small.split()], standalone_mode=False)
    assert json.loads((out / "report.json").read_text())["acceptance"]["head alone"]["all"]["drafted"][0] > 0
    assert is_eagle(out)
    target = load(str(tiny.folder), "cpu", "float32")
    assert isinstance(make_drafter(str(out), target, blocks=9, block_tokens=16), FirstOf)
