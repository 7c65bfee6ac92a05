"""`python -m worker_service.bench.weights`: one model with weights of several kinds, which take turns: tokens a second
without drafts, and the perplexity of a text. Nothing is quantised here."""

import json as json_format
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from worker_service.bench.race import Answer, Batch, System, race
from worker_service.bench.subject import BLOCK_TOKENS, PROMPTS
from worker_service.bench.systems import Ours
from worker_service.drafters import make_drafter
from worker_service.engine.engine import Engine
from worker_service.engine.kv import KV
from worker_service.engine.target import InputSequence
from worker_service.model_files import ModelError
from worker_service.models import LoadedModel, load
from worker_service.outputs import writable
from worker_service.prompts import PromptError, encode, read_prompts
from worker_service.pull import resolve

_WINDOW = 512  # tokens of the text that are computed together, without what is before them
_PROMPT_TOKENS = 256  # longer prompts are left out
_WIDTH = 140  # of the table where there is no terminal to ask

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one kind at one batch size: tokens a second in rounds without prefill, by batch of prompts."""

    tokens_per_s: list[float]
    ratios: list[float]  # to the first kind's, of the same prompts


@dataclass(frozen=True, slots=True)
class Kind:
    """What weights of one kind showed. `speeds`: by batch size."""

    megabytes: float  # of weights, before the engine packs any that are whole
    perplexity: float
    speeds: dict[int, Speed]


def weight_bytes(model: Any) -> int:
    """Of a model that no engine has taken over yet; matrices that are tied count once."""
    packed: dict[int, int] = {id(x.packed): x.packed.nbytes for x in model.modules() if hasattr(x, "packed")}
    return sum(packed.values()) + sum(int(parameter.nbytes) for parameter in model.parameters())


@torch.inference_mode()
def perplexity(engine: Engine, text: Sequence[int]) -> float:
    """Of the tokens of a text, in windows; the first token of each is given. Raises ValueError for less than two."""
    if len(text) < 2:
        raise ValueError("the text has less than two tokens")
    nats, count = 0.0, 0
    for begin in range(0, len(text) - 1, _WINDOW):
        window, kv = list(text[begin : begin + _WINDOW]), KV(engine.pool)
        kv.extend(len(window))
        logits = engine.target.forward([InputSequence(kv, 0, window, 0)]).logits[:-1]
        kv.release()
        nats += float(torch.nn.functional.cross_entropy(logits, torch.tensor(window[1:]), reduction="sum"))
        count += len(window) - 1
    return float(torch.tensor(nats / count, dtype=torch.float64).exp())


def measure(options: Namespace) -> dict[str, Kind]:
    """By kind, in the order that was asked for. Raises ModelError, PromptError, OSError or ValueError."""
    folder, text = str(resolve(options.model)), options.text.read_text()
    engines: dict[str, Engine] = {}
    sizes: dict[str, int] = {}
    perplexities: dict[str, float] = {}
    prompts: list[list[int]] = []
    tokens: list[int] = []
    for kind in dict.fromkeys(options.weights):
        loaded = load(folder, "cpu", options.dtype, weights=kind)
        sizes[kind] = weight_bytes(loaded.model)
        engines[kind] = _engine(loaded, max(options.batch), options.tokens)
        prompts = prompts or [
            ids
            for prompt in read_prompts([PROMPTS], test=True)
            if len(ids := encode(loaded.tokenizer, prompt.text)) <= _PROMPT_TOKENS
        ]
        tokens = tokens or list(loaded.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        perplexities[kind] = perplexity(engines[kind], tokens)
    systems: dict[str, System] = {kind: Ours(engine, 0) for kind, engine in engines.items()}
    speeds: dict[str, dict[int, Speed]] = {kind: {} for kind in engines}
    for size in options.batch:
        endless = cycle(prompts)
        batches: list[Batch] = [list(islice(endless, size)) for _ in range(options.repetitions)]
        race(systems, batches[:1], options.tokens)  # warms up
        for kind, speed in compare(race(systems, batches, options.tokens)).items():
            speeds[kind][size] = speed
    return {kind: Kind(sizes[kind] / 1e6, perplexities[kind], speeds[kind]) for kind in engines}


def compare(answers: dict[str, list[Answer]]) -> dict[str, Speed]:
    """Speeds by kind; ratios are to the first."""
    rates = {kind: [each.rounds.tokens / each.rounds.seconds for each in own] for kind, own in answers.items()}
    first = next(iter(rates.values()))
    return {kind: Speed(own, [x / y for x, y in zip(own, first, strict=True)]) for kind, own in rates.items()}


def _engine(loaded: LoadedModel, batch: int, tokens: int) -> Engine:
    context = max(_PROMPT_TOKENS + tokens, _WINDOW)
    blocks = max(batch, 1) * -(-(context + 1) // BLOCK_TOKENS)
    return Engine(
        loaded.model,
        loaded.tokenizer,
        eos_ids=frozenset(),
        context_tokens=context,
        blocks=blocks,
        block_tokens=BLOCK_TOKENS,
        drafter=make_drafter("none", loaded, blocks=blocks, block_tokens=BLOCK_TOKENS),
    )


def show(found: dict[str, Kind], console: Console) -> None:
    """A row for each kind: medians, in brackets the least and the most, and how many times as fast as the first."""
    sizes = list(next(iter(found.values())).speeds)
    table = Table("weights", "MB", "perplexity", *(f"tokens/s at batch {size}" for size in sizes))
    for name, kind in found.items():
        cells = []
        for speed in kind.speeds.values():
            rates, ratios = speed.tokens_per_s, speed.ratios
            ratio = f"{median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
            cells.append(f"{median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f})\n{ratio}")
        table.add_row(name, f"{kind.megabytes:.0f}", f"{kind.perplexity:.3f}", *cells)
    console.print(table)


@app.command()
def weights(
    text: Annotated[Path, typer.Option(metavar="FILE", help="Whose perplexity is told.")],
    model: Annotated[str, typer.Option(help="As in `laps-sd pull`.")] = "smollm2-135m",
    weights: Annotated[str, typer.Option(metavar="KIND,...", help="As of `laps-sd up`.")] = "auto,int8,int4",
    batch: Annotated[str, typer.Option(metavar="N,N,...", help="Batch sizes.")] = "1,4,8,16",
    tokens: Annotated[int, typer.Option(min=2, help="Of output for each prompt.")] = 64,
    repetitions: Annotated[int, typer.Option(min=1, help="Each with other prompts.")] = 5,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: all cores.")] = 0,
    json: Annotated[Path | None, typer.Option(metavar="FILE", callback=writable, help="The whole record.")] = None,
) -> None:
    """Weights of several kinds in turn, on a CPU."""
    sizes = [int(part) if part.isdecimal() else 0 for part in batch.split(",")]
    if min(sizes) < 1:
        raise typer.BadParameter(f"{batch!r} is not a list of batch sizes such as 1,8", param_hint="--batch")
    kinds = weights.split(",")
    if strange := set(kinds) - {"auto", "int8", "int4", "stored"}:
        raise typer.BadParameter(f"{min(strange)!r} is none of auto, int8, int4, stored", param_hint="--weights")
    if threads:
        torch.set_num_threads(threads)
    options = Namespace(
        text=text, model=model, weights=kinds, batch=sizes, tokens=tokens, repetitions=repetitions, dtype=dtype
    )
    try:
        found = measure(options)
        show(found, Console() if sys.stdout.isatty() else Console(width=_WIDTH))
        if json:
            record = {name: asdict(kind) for name, kind in found.items()}
            json.write_text(json_format.dumps(record, indent=1) + "\n")
    except (ModelError, PromptError, OSError, ValueError) as error:
        sys.exit(f"bench of weights: {error}")


if __name__ == "__main__":
    app(prog_name="python -m worker_service.bench.weights")
