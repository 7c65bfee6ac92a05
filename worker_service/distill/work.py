"""What `laps-sd distill` does: generate, train, evaluate. An interrupted run goes on where it was."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, TypeAlias

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from worker_service.distill.claim import SAMPLES, check_unlearned, claim, name_of
from worker_service.distill.data import Sample, generate
from worker_service.distill.eagle import EagleTrainer, new_eagle, states
from worker_service.distill.evaluate import LONGEST, Acceptance, measure
from worker_service.distill.probe import judge, make_probe, tell_worth
from worker_service.distill.speed import Speed, compare
from worker_service.distill.train import Features, Trainer, draft_vocabulary, initialise, last_states, train
from worker_service.drafters import eagle_drafter, vocabulary_digest, with_lookup
from worker_service.engine.drafting.drafter import ALL, Drafter, NoDrafter
from worker_service.engine.drafting.eagle import EagleHead, load_eagle, save_eagle
from worker_service.engine.drafting.head import DraftHead, DraftHeadConfig, load_head, save_head
from worker_service.engine.drafting.head_drafter import HeadDrafter
from worker_service.engine.drafting.ngram import NgramDrafter
from worker_service.engine.engine import Engine
from worker_service.engine.shape import text_config
from worker_service.model_files import ModelError
from worker_service.models import LoadedModel, load
from worker_service.probes import find_head
from worker_service.prompts import Prompt, PromptError, encode, read_prompts
from worker_service.pull import resolve

Maker: TypeAlias = Callable[..., Drafter]  # of a head: a drafter at the price that its keyword `price` says

_BLOCK_TOKENS = 64
_PIPE_WIDTH = 120  # of the tables where there is no terminal to ask


def run(options: Namespace) -> None:
    """`options`: what command.py was told. Ends the process where it fails or is interrupted."""
    torch.manual_seed(0)
    if options.threads:
        torch.set_num_threads(options.threads)
    console = Console(stderr=True)
    try:
        distill(options, console)
    except (ModelError, PromptError, OSError) as error:
        told = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else error
        sys.exit(f"distill: {told}")
    except KeyboardInterrupt:
        console.print(f"interrupted; the same command goes on from {options.work}")
        sys.exit(130)


def distill(options: Namespace, console: Console) -> None:
    target = load(str(resolve(options.target)), options.device)
    if not (options.judge or options.probe):
        _check_form(target)
    options.out.mkdir(parents=True, exist_ok=True)  # before the work, of which it is the end
    claim(options, target)
    head = find_head(options.judge, target) if options.judge else None
    if options.judge and head is None:
        raise ModelError(f"--judge {options.judge}: there is no such probe for {target.name}")
    with _progress(console) as bar:
        if head is not None:
            prompts = read_prompts(options.prompts, options.test, test=True)
            judges = _generate(options, target, prompts, name_of(prompts), options.test_tokens, bar)
            return console.print(f"answers and readings: {judge(options, target, head, judges)}")
        tests = read_prompts(options.test, test=True) if options.test else []
        check_unlearned(options, tests)
        samples = _generate(options, target, read_prompts(options.prompts, options.test), SAMPLES, options.tokens, bar)
        learned = [sample for sample in samples if not sample.held_out and len(sample.output) > 1]
        judges = [sample for sample in samples if sample.held_out]
        if tests:
            judges = _generate(options, target, tests, name_of(tests), options.test_tokens, bar)
        judges = [sample for sample in judges if len(sample.output) > 1]
        if not learned or not judges:
            lacking = "none is left to learn from, or none to judge by"
            raise PromptError(f"too few answers: {lacking}; raise --tokens, or give more prompts")
        if options.probe:
            return tell_worth(make_probe(options, target, learned, judges), options, console)
        maker = _learn(options, target, learned, bar)
        acceptance = evaluate(maker, target, judges, bar)
        report: dict[str, object] = {"acceptance": acceptance}
        _write(report, options)  # it took long, and the race may want more memory than there is
    tables = Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)
    _print_acceptance(acceptance, tables)
    command = f"laps-sd up --model {options.target} --drafter {options.out}"
    console.print(f"the drafter: {options.out}; serve with it: {command}")
    with _progress(console) as bar:
        speed = _race(options, target, maker, judges, bar)
    _write(report | {"speed": {name: asdict(row) for name, row in speed.items()}}, options)
    _print_speed(speed, options, tables)


def _write(report: dict[str, object], options: Namespace) -> None:
    (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")


def _check_form(target: LoadedModel) -> None:
    """Raises ModelError for a target that no head of ours is made for."""
    base = target.model.base_model
    if not (hasattr(base, "layers") and hasattr(base, "norm") and hasattr(target.model, "lm_head")):
        kind = target.model.config.model_type
        raise ModelError(f"no head can be made for {target.name}: a {kind} model has other parts")


def _engine(options: Namespace, drafter: Drafter, tokenizer: Any, batch: int) -> Engine:
    target = load(str(resolve(options.target)), options.device)  # each engine changes the model that it is given
    return Engine(
        target.model,
        tokenizer,
        eos_ids=target.eos_ids,
        context_tokens=target.context_tokens,
        blocks=_blocks(options, batch),
        block_tokens=_BLOCK_TOKENS,
        drafter=drafter,
    )


def _blocks(options: Namespace, batch: int) -> int:
    """Of KV, for so many requests at once."""
    longest: int = options.max_prompt_tokens + options.max_tokens
    return batch * -(-longest // _BLOCK_TOKENS)


def _generate(
    options: Namespace, target: LoadedModel, prompts: Sequence[Prompt], name: str, tokens: int, bar: Progress
) -> list[Sample]:
    """The target's own answers, made by the engine without drafts."""

    task = bar.add_task(f"generate {name}", total=tokens, unit="tokens")
    return generate(
        _engine(options, NoDrafter(), target.tokenizer, options.batch),
        partial(encode, target.tokenizer),
        prompts,
        options.work / f"{name}.jsonl",
        tokens=tokens,
        batch=options.batch,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        max_prompt_tokens=options.max_prompt_tokens,
        progress=lambda done: bar.update(task, completed=done),
    )


def _learn(options: Namespace, target: LoadedModel, learned: Sequence[Sample], bar: Progress) -> Maker:
    """Train a head of the chosen kind and save it. Drafters are made of it as it will be used."""
    model, ids = target.model, draft_vocabulary(learned, options.draft_tokens)
    tables = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if options.kind == "eagle3":
        eagle = new_eagle(model, ids, vocabulary_digest(target.tokenizer))
        _train(options, target, learned, bar, EagleTrainer, eagle, states, "features-eagle3.bin")
        save_eagle(eagle, options.out)
        blocks = _blocks(options, 1) + 1
        return partial(eagle_drafter, load_eagle(options.out), target, blocks=blocks, block_tokens=_BLOCK_TOKENS)
    config = text_config(model.config)
    head = DraftHead(
        DraftHeadConfig(
            target=target.name,
            vocabulary=vocabulary_digest(target.tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=getattr(config, "intermediate_size", 4 * config.hidden_size),
            draft_tokens=len(ids),
        )
    )
    head.draft_ids.copy_(torch.tensor(ids))
    initialise(head, model)
    _train(options, target, learned, bar, Trainer, head, last_states, "features.bin")
    save_head(head, options.out)
    return partial(HeadDrafter, load_head(options.out), *tables)


def _train(
    options: Namespace,
    target: LoadedModel,
    learned: Sequence[Sample],
    bar: Progress,
    kind: type[Trainer],
    head: DraftHead | EagleHead,
    known: Callable[[Any, torch.Tensor], torch.Tensor],
    file: str,
) -> None:
    """Train `head` on what `known` tells at each position, which is kept in `file`."""
    model = target.model
    with torch.inference_mode():
        width = known(model, torch.tensor(learned[0].prompt[:1], device=model.device)).shape[1]
    features = Features(options.work / file, learned, width)
    read = bar.add_task("read", total=None, unit="answers")
    features.compute(model, learned, lambda done, total: bar.update(read, completed=done, total=total), known)
    tables = model.get_input_embeddings(), model.lm_head
    embeddings, output = (table.weight.detach().bfloat16().cpu() for table in tables)
    trainer = kind(head, embeddings, output, unroll=options.unroll, learning_rate=options.learning_rate)
    task = bar.add_task("train", total=None, unit="steps")

    def progress(done: int, total: int, loss: float) -> None:
        bar.update(task, completed=done, total=total, description=f"train, loss {loss:.2f}")

    train(
        trainer,
        learned,
        features,
        options.work / ("checkpoint.pt" if kind is Trainer else "checkpoint-eagle3.pt"),
        passes=options.passes,
        batch_tokens=options.batch_tokens,
        progress=progress,
    )


@torch.inference_mode()
def evaluate(
    maker: Maker, target: LoadedModel, samples: Sequence[Sample], bar: Progress
) -> dict[str, dict[str, dict[str, object]]]:
    """Acceptance on `samples` by drafter and category: n-grams, the head alone with every draft, and the default."""
    model = target.model
    drafters: dict[str, Drafter] = {
        "ngram": NgramDrafter(),
        "head alone": maker(price=ALL),
        "default": with_lookup(maker()),
    }

    def hidden(sample: Sample) -> torch.Tensor:
        return last_states(model, whole(sample))[len(sample.prompt) - 1 :]

    def between(sample: Sample) -> torch.Tensor:
        return states(model, whole(sample))[:, : -text_config(model.config).hidden_size]

    def whole(sample: Sample) -> torch.Tensor:
        return torch.tensor((sample.prompt + sample.output)[:-1], device=model.device)

    task = bar.add_task("evaluate", total=len(drafters) * len(samples), unit="answers")
    return {
        name: {
            category: asdict(figures)
            for category, figures in measure(
                drafter, samples, hidden, lambda: bar.advance(task), between if drafter.layers else None
            ).items()
        }
        for name, drafter in drafters.items()
    }


def _race(
    options: Namespace, target: LoadedModel, maker: Maker, samples: Sequence[Sample], bar: Progress
) -> dict[str, Speed]:
    default = with_lookup(maker())
    drafters: dict[str, Drafter] = {"none": NoDrafter(), "ngram": NgramDrafter(), "default": default}
    prompts = [sample.prompt for sample in samples[: options.race]]
    task = bar.add_task("race", total=len(drafters) * len(prompts), unit="answers")
    return compare(
        _engine(options, default, target.tokenizer, 1),
        drafters,
        prompts,
        max_tokens=options.max_tokens,
        draft_len=options.race_draft_len,
        progress=lambda: bar.advance(task),
    )


def _print_acceptance(acceptance: dict[str, dict[str, dict[str, object]]], console: Console) -> None:
    table = Table(title="accepted per drafted token, at draft length")
    for name in ("drafter", "category", *map(str, range(1, LONGEST + 1)), "tokens a round at 4"):
        table.add_column(name, justify="left" if name in ("drafter", "category") else "right")
    for drafter, categories in acceptance.items():
        for category, fields in categories.items():
            figures = Acceptance(**fields)  # type: ignore[arg-type]
            shares = [f"{figures.per_drafted(length):.2f}" for length in range(1, LONGEST + 1)]
            table.add_row(drafter, category, *shares, f"{figures.per_round(4):.2f}")
    console.print(table)


def _print_speed(speed: dict[str, Speed], options: Namespace, console: Console) -> None:
    read = "; all three hand out the layers that the head reads" if options.kind == "eagle3" else ""
    table = Table(title=f"one request at a time{read}")
    for name in ("drafter", "tokens/s", "ms a target pass", "ms a draft", "accepted per drafted", "tokens a round"):
        table.add_column(name, justify="left" if name == "drafter" else "right")
    for drafter, row in speed.items():
        table.add_row(
            drafter,
            f"{row.tokens_per_s:.1f}",
            f"{row.verify_ms:.1f}",
            f"{row.draft_ms:.2f}",
            f"{row.accepted_per_drafted:.2f}",
            f"{row.tokens_per_round:.2f}",
        )
    console.print(table)


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    count = TextColumn("{task.completed} {task.fields[unit]}")
    with Progress(*columns, count, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        yield bar
