"""`python -m worker_service.distill`: generate, train, evaluate; each half goes on where it was interrupted."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from worker_service.distill.data import PromptError, Sample, generate, read_prompts
from worker_service.distill.evaluate import LONGEST, Acceptance, measure
from worker_service.distill.train import Features, Trainer, draft_vocabulary, initialise, train
from worker_service.drafters import vocabulary_digest, with_lookup
from worker_service.engine.draft import Drafter, NgramDrafter, NoDrafter
from worker_service.engine.draft_head import Head, HeadConfig, HeadDrafter, load_head, save_head
from worker_service.engine.engine import Engine
from worker_service.models import LoadedModel, load
from worker_service.pull import ModelError, resolve

_BLOCK_TOKENS = 64


def main() -> None:
    options = _options()
    torch.manual_seed(0)
    if options.threads:
        torch.set_num_threads(options.threads)
    console = Console(stderr=True)
    try:
        distill(options, console)
    except (ModelError, PromptError, OSError) as error:
        sys.exit(f"distill: {error}")
    except KeyboardInterrupt:
        console.print(f"interrupted; the same command goes on from {options.work}")
        sys.exit(130)


def distill(options: argparse.Namespace, console: Console) -> None:
    target = load(str(resolve(options.target)), options.device)
    options.work.mkdir(parents=True, exist_ok=True)
    with _progress(console) as bar:
        samples = _generate(options, target, bar)
        if not any(sample.held_out for sample in samples) or all(sample.held_out for sample in samples):
            raise PromptError(f"{len(samples)} prompts are too few: none for training, or none left for evaluation")
        head = _train(options, target, samples, bar)
    save_head(head, options.out)
    report = evaluate(load_head(options.out), target, [s for s in samples if s.held_out and len(s.output) > 1])
    (options.out / "acceptance.json").write_text(json.dumps(report, indent=1) + "\n")
    _print(report, Console())
    console.print(f"the drafter: {options.out}; use it with --drafter {options.out}")


def _generate(options: argparse.Namespace, target: LoadedModel, bar: Progress) -> list[Sample]:
    """The target's own answers, made by the engine without drafts."""
    prompts = read_prompts(options.prompts, options.exclude)
    engine = Engine(
        load(str(resolve(options.target)), options.device).model,  # the engine changes the model that it is given
        target.tokenizer,
        eos_ids=target.eos_ids,
        context_tokens=target.context_tokens,
        blocks=options.batch * -(-(options.max_prompt_tokens + options.max_tokens) // _BLOCK_TOKENS),
        block_tokens=_BLOCK_TOKENS,
        drafter=NoDrafter(),
    )

    def encode(text: str) -> Sequence[int]:
        if target.tokenizer.chat_template is None:
            return list(target.tokenizer(text).input_ids)
        messages = [{"role": "user", "content": text}]
        rendered = target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return list(target.tokenizer(rendered, add_special_tokens=False).input_ids)

    task = bar.add_task("generate", total=options.tokens, unit="tokens")
    return generate(
        engine,
        encode,
        prompts,
        options.work / "samples.jsonl",
        tokens=options.tokens,
        batch=options.batch,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        max_prompt_tokens=options.max_prompt_tokens,
        progress=lambda tokens: bar.update(task, completed=tokens),
    )


def _train(options: argparse.Namespace, target: LoadedModel, samples: Sequence[Sample], bar: Progress) -> Head:
    model = target.model
    learned = [sample for sample in samples if not sample.held_out and len(sample.output) > 1]
    features = Features(options.work / "features.bin", learned, model.config.hidden_size)
    read = bar.add_task("read", total=None, unit="answers")
    features.compute(model, learned, lambda done, total: bar.update(read, completed=done, total=total))
    ids = draft_vocabulary(learned, options.draft_tokens)
    head = Head(
        HeadConfig(
            target=target.name,
            vocabulary=vocabulary_digest(target.tokenizer),
            hidden_size=model.config.hidden_size,
            intermediate_size=getattr(model.config, "intermediate_size", 4 * model.config.hidden_size),
            draft_tokens=len(ids),
        )
    )
    head.draft_ids.copy_(torch.tensor(ids))
    initialise(head, model)
    embeddings, output = (w.weight.detach().bfloat16() for w in (model.get_input_embeddings(), model.lm_head))
    trainer = Trainer(
        head, embeddings, output[head.draft_ids], unroll=options.unroll, learning_rate=options.learning_rate
    )
    task = bar.add_task("train", total=None, unit="steps")

    def progress(done: int, total: int, loss: float) -> None:
        bar.update(task, completed=done, total=total, description=f"train, loss {loss:.2f}")

    train(
        trainer,
        learned,
        features,
        options.work / "checkpoint.pt",
        passes=options.passes,
        batch_tokens=options.batch_tokens,
        progress=progress,
    )
    return head


@torch.inference_mode()
def evaluate(head: Head, target: LoadedModel, samples: Sequence[Sample]) -> dict[str, dict[str, dict[str, object]]]:
    """Acceptance on `samples` by drafter and category: n-grams, the head alone and sure of itself or not, and both."""
    model = target.model
    tables = model.get_input_embeddings().weight, model.get_output_embeddings().weight

    def hidden(sample: Sample) -> torch.Tensor:
        tokens = torch.tensor([(sample.prompt + sample.output)[:-1]], device=model.device)
        rows = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[0]
        result: torch.Tensor = rows[len(sample.prompt) - 1 :]
        return result

    always = HeadDrafter(head, *tables, sure=0.0)
    drafters: dict[str, Drafter] = {"ngram": NgramDrafter(), "head, always": always}
    drafters["default"] = with_lookup(HeadDrafter(head, *tables))
    return {
        name: {category: asdict(figures) for category, figures in measure(drafter, samples, hidden).items()}
        for name, drafter in drafters.items()
    }


def _print(report: dict[str, dict[str, dict[str, object]]], console: Console) -> None:
    table = Table(title="held-out prompts: accepted per drafted token, at draft length")
    for name in ("drafter", "category", *map(str, range(1, LONGEST + 1)), "tokens a round at 4"):
        table.add_column(name, justify="left" if name in ("drafter", "category") else "right")
    for drafter, categories in report.items():
        for category, figures in categories.items():
            acceptance = Acceptance(**figures)  # type: ignore[arg-type]
            shares = [f"{acceptance.per_drafted(length):.2f}" for length in range(1, LONGEST + 1)]
            table.add_row(drafter, category, *shares, f"{acceptance.per_round(4):.2f}")
    console.print(table)


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    count = TextColumn("{task.completed} {task.fields[unit]}")
    with Progress(*columns, count, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        yield bar


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="laps-sd distill", description="Make a draft head for a target model.")
    add: Callable[..., argparse.Action] = parser.add_argument
    add("--target", required=True, metavar="M", help="a model as in `laps-sd pull`")
    add("--prompts", required=True, nargs="+", type=Path, metavar="FILE", help="JSON Lines (.gz) with `prompt`")
    add("--exclude", nargs="*", type=Path, default=[], metavar="FILE", help="prompts never to learn from")
    add("--out", required=True, type=Path, metavar="DIR", help="where the drafter goes")
    add("--work", type=Path, metavar="DIR", help="samples and checkpoints; default: OUT.work")
    add("--tokens", type=int, default=1_000_000, help="of the target's own output")
    add("--batch", type=int, default=32, help="prompts answered at once")
    add("--max-tokens", type=int, default=256, help="of an answer")
    add("--max-prompt-tokens", type=int, default=512, help="longer prompts are left out")
    add("--temperature", type=float, default=0.7, help="of each third prompt; the others are answered greedily")
    add("--draft-tokens", type=int, default=8192, help="size of the draft vocabulary")
    add("--passes", type=int, default=8, help="over all of the output")
    add("--batch-tokens", type=int, default=768, help="of a training step")
    add("--learning-rate", type=float, default=2e-3)
    add("--unroll", type=int, default=2, help="steps of a chain that are trained")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--threads", type=int, default=0, help="CPU threads; 0: all cores")
    options = parser.parse_args()
    options.work = options.work or options.out.with_name(options.out.name + ".work")
    return options


if __name__ == "__main__":
    main()
