"""The whole path for a GPU, on a device that is pretended (pretended.py), gives what a CPU gives: every parameter of a
request, every drafter, structured output, scored prompts, embeddings, readings of the length, KV that goes to the host
and comes back, a model over stages."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
import torch

from protos.structure import grammar
from protos.v1.types_pb2 import Structure
from tests.worker.eagles import make_eagle
from tests.worker.harness import Tiny
from tests.worker.pretended import pretended
from tests.worker.staged import LocalRing
from worker_service.drafters import eagle_drafter
from worker_service.engine import native
from worker_service.engine.drafting.drafter import ALL, Drafter, NoDrafter
from worker_service.engine.drafting.eagle import load_eagle
from worker_service.engine.drafting.model import ModelDrafter
from worker_service.engine.drafting.ngram import NgramDrafter
from worker_service.engine.engine import Engine
from worker_service.engine.length_head import LengthHead, LengthHeadConfig, LengthProbe
from worker_service.engine.stages import Stage
from worker_service.engine.types import Admission, Limits, Place, Row, Run, Sampling
from worker_service.models import LoadedModel, load

CUDA = "cuda:0"
SAMPLINGS = [
    Sampling(logprobs=2, prompt_logprobs=1, embedding=True),
    Sampling(temperature=0.9, seed=3, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, logprobs=0),
    Sampling(temperature=1.2, top_k=20, top_p=0.8, seed=4, logit_bias=((7, 4.0), (9, -50.0))),
    Sampling(grammar=grammar(Structure(regex="[a-f]{3,9}[0-9]{1,4}")), temperature=0.8, seed=5),
    Sampling(repetition_penalty=1.1, prompt_logprobs=0, logprobs=1),
]


@contextmanager
def device(name: str) -> Iterator[None]:
    """Without the native kernels: a GPU has torch's operations alone."""
    with patch.object(native, "kernels", lambda: None):
        if name != CUDA:
            yield
        else:
            with pretended():
                yield


def drafter(kind: str, target: LoadedModel, folder: Path) -> Drafter:
    if kind == "eagle":
        return eagle_drafter(load_eagle(folder), target, blocks=64, block_tokens=8, price=ALL)
    if kind == "model":
        draft = load(str(folder), str(target.device), str(target.dtype).removeprefix("torch.")).model
        return ModelDrafter(draft, context_tokens=512, blocks=64, block_tokens=8)
    return NgramDrafter() if kind == "ngram" else NoDrafter()


def engine_on(name: str, kind: str, tiny: Tiny, folder: Path, dtype: str = "float32") -> Engine:
    target = load(str(tiny.folder), name, dtype)
    head = LengthHead(LengthHeadConfig(1, "", "", target.model.config.hidden_size, 2))
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(torch.arange(weight.numel()).view(weight.shape).sin().to(weight.device))
    return Engine(
        target.model,
        target.tokenizer,
        eos_ids=target.eos_ids,
        context_tokens=512,
        blocks=40,
        block_tokens=8,
        host_blocks=16,
        drafter=drafter(kind, target, folder),
        probe=LengthProbe(head, target.device),
    )


def disturbed(engine: Engine, tiny: Tiny) -> list[Row]:
    """All rows of a few requests that run in changing company and lose their KV, to the host's memory or for good."""
    chance, rows = Random(1), list[Row]()
    for i, own in enumerate(SAMPLINGS):
        prompt = tiny.prompt("A short request overtakes a long one, and the long one waits. " * (1 + i))[: 20 + 9 * i]
        engine.admit(Admission(str(i), 1, prompt, len(prompt), own, Limits(12, min_tokens=3)))
    for request in engine._requests.values():
        if request.matcher:
            request.matcher.copy()  # waits for its grammar: when that is ready must not decide who runs
    live = [str(i) for i in range(len(SAMPLINGS))]
    while live:
        names = chance.sample(live, chance.randint(1, len(live)))
        step = engine.step([Run(name, chance.randint(0, 4), 16) for name in names], len(names))
        rows += step.rows
        live = [name for name in live if not any(row.request_id == name and row.finish for row in step.rows)]
        if live:
            chance.choice([engine.offload, engine.drop, lambda _: None])(chance.choice(live))
    return rows


def rounded(row: Row) -> Row:
    """Numbers that two devices' sums may round differently, to fewer digits, and readings left out."""

    def few(numbers: Any) -> Any:
        return tuple(replace(each, logprob=round(each.logprob, 3), top=()) for each in numbers)

    told = {"logprobs": few(row.logprobs), "prompt_logprobs": few(row.prompt_logprobs)}
    return replace(row, embedding=tuple(round(x, 3) for x in row.embedding), remaining=None, **told)


@pytest.fixture(scope="module")
def folders(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"eagle": make_eagle(tmp_path_factory.mktemp("eagle"), tiny.model), "model": tiny.folder}


@pytest.mark.parametrize("kind", ["none", "ngram", "eagle", "model"])
def test_a_gpu_gives_what_a_cpu_gives(kind: str, tiny: Tiny, folders: dict[str, Path]) -> None:
    found = {}
    for name in ("cpu", CUDA):
        with device(name):
            found[name] = disturbed(engine_on(name, kind, tiny, folders.get(kind, tiny.folder)), tiny)
    assert [rounded(row) for row in found[CUDA]] == [rounded(row) for row in found["cpu"]]
    told = found[CUDA]
    assert not any(row.error for row in told)
    assert any(row.logprobs for row in told)
    assert any(row.prompt_logprobs for row in told)
    assert any(row.embedding for row in told)
    assert any(row.remaining for row in told)
    assert any(row.drafted for row in told) == (kind != "none")


@pytest.mark.parametrize("kind", ["ngram", "eagle", "model"])
@patch("worker_service.engine.drafting.model._CATCH_UP_TOKENS", 16)
def test_a_gpu_serves_all_of_that_in_bfloat16_too(
    kind: str, tiny: Tiny, folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Its default. Rounding makes other texts, so whether there are any is all that is asked."""
    with device(CUDA):
        rows = disturbed(engine_on(CUDA, kind, tiny, folders.get(kind, tiny.folder), "bfloat16"), tiny)
    assert not any(row.error for row in rows)
    assert any(row.drafted for row in rows)
    assert "a drafter failed" not in caplog.text


def test_a_model_over_stages_on_gpus_gives_what_one_on_cpus_gives(tiny: Tiny) -> None:
    found = {}
    for name in ("cpu", CUDA):
        with device(name):
            first, second = (load(str(tiny.folder), name, "float32", place=Place(number, 2)) for number in range(2))
            engine = Engine(
                first.model,
                first.tokenizer,
                eos_ids=first.eos_ids,
                context_tokens=512,
                blocks=40,
                block_tokens=8,
                host_blocks=16,
                drafter=NgramDrafter(),
                group=LocalRing([Stage(second.model, last=True)]),
            )
            found[name] = disturbed(engine, tiny)
    assert [rounded(row) for row in found[CUDA]] == [rounded(row) for row in found["cpu"]]
    assert any(row.drafted for row in found[CUDA])
