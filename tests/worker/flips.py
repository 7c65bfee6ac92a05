"""`python -m tests.worker.flips`: how many greedy choices depend on the shape of the batch. It measures, and checks
nothing.

Sums in floating point depend on the shape of what is computed together. The model's own greedy text is computed again,
token for token the same, in other batches and with several tokens a pass, as verification does; a flip is a position
where another token comes out best than with one request and one token a pass.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from worker_service.bench import subject
from worker_service.engine.kv import KV, BlockPool
from worker_service.engine.target import InputSequence, Target
from worker_service.model_files import ModelError
from worker_service.models import load, load_light
from worker_service.prompts import PromptError, encode, read_prompts
from worker_service.pull import resolve

CLEAR = 1e-3  # of logits; where the reference's two best are closer, either token counts as right
DTYPES = ("float32", "bfloat16")
_BLOCK_TOKENS = 64
_PROMPTS = Path(subject.__file__).with_name("prompts.jsonl")


class Shape(NamedTuple):
    batch: int  # requests in a pass
    width: int  # tokens of each


SHAPES = (Shape(1, 1), Shape(8, 1), Shape(16, 1), Shape(1, 5), Shape(8, 5), Shape(16, 5))


@dataclass(frozen=True, slots=True)
class Text:
    prompt: list[int]
    output: list[int]


@dataclass(frozen=True, slots=True)
class Flips:
    """Counts of positions. `clear`: those of `reference` where its two best logits differ by more than CLEAR."""

    dtype: str
    batch: int
    width: int
    tokens: int
    alone: int  # another choice than with batch 1 and width 1 in the same dtype
    reference: int  # another choice than transformers' in float32
    clear: int


def measure(folder: str, prompts: Sequence[str], *, tokens: int, device: str = "auto") -> Iterator[Flips]:
    """Flips of each dtype and shape, over `tokens` greedy tokens after each prompt. Raises ModelError."""
    texts: list[Text] = []
    expected: list[tuple[int, bool]] = []
    for dtype in DTYPES:
        loaded = load(folder, device, dtype)
        on_cpu = loaded.device.type == "cpu"
        light = load_light(Path(folder), loaded.dtype, _BLOCK_TOKENS) if on_cpu else None  # as a worker does
        ids = [encode(loaded.tokenizer, prompt)[: loaded.context_tokens - tokens] for prompt in prompts]
        each = -(-(max(map(len, ids)) + tokens) // _BLOCK_TOKENS)
        target = Target((light or loaded).model)
        pool = target.new_pool(each * max(shape.batch for shape in SHAPES), _BLOCK_TOKENS)
        if not texts:
            texts = [Text(prompt, _greedy(target, pool, prompt, tokens)) for prompt in ids]
            expected = _expected(load(folder, device, "float32").model, texts)
        alone: list[int] = []
        for shape in SHAPES:
            chosen = [token for group in _groups(texts, shape.batch) for token in _forced(target, pool, group, shape)]
            alone = alone or chosen
            other = [clear for token, (best, clear) in zip(chosen, expected, strict=True) if token != best]
            flips = sum(a != b for a, b in zip(chosen, alone, strict=True))
            yield Flips(dtype, *shape, len(chosen), flips, len(other), sum(other))


def _groups(texts: Sequence[Text], size: int) -> Iterator[Sequence[Text]]:
    return (texts[begin : begin + size] for begin in range(0, len(texts), size))


@torch.inference_mode()
def _greedy(target: Target, pool: BlockPool, prompt: list[int], tokens: int) -> list[int]:
    """End-of-sequence ids are tokens like any other here: every text is `tokens` long, and so every batch full."""
    kv, feed, output = KV(pool), prompt, list[int]()
    while len(output) < tokens:
        start = kv.length
        kv.extend(len(feed))
        logits = target.forward([InputSequence(kv, start, feed, len(feed) - 1)]).logits
        feed = [int(logits[0].argmax())]
        output += feed
    kv.release()
    return output


@torch.inference_mode()
def _forced(target: Target, pool: BlockPool, texts: Sequence[Text], shape: Shape) -> list[int]:
    """The best token at every position of the texts but the first, which comes of a prefill: all shapes share that."""
    caches = [KV(pool) for _ in texts]
    for kv, text in zip(caches, texts, strict=True):
        kv.extend(len(text.prompt))
        target.forward([InputSequence(kv, 0, text.prompt, len(text.prompt) - 1)])
    chosen: list[list[int]] = [[] for _ in texts]
    for begin in range(0, len(texts[0].output) - 1, shape.width):
        sequences = []
        for kv, text in zip(caches, texts, strict=True):
            feed = text.output[begin : min(begin + shape.width, len(text.output) - 1)]
            kv.extend(len(feed))
            sequences.append(InputSequence(kv, kv.length - len(feed), feed, 0))
        best = iter(target.forward(sequences)[0].argmax(-1).tolist())
        for own, sequence in zip(chosen, sequences, strict=True):
            own += islice(best, len(sequence.tokens))
    for kv in caches:
        kv.release()
    return [token for own in chosen for token in own]


@torch.inference_mode()
def _expected(model: Any, texts: Sequence[Text]) -> list[tuple[int, bool]]:
    """transformers' choice at each position, and whether it is a clear one."""
    found = []
    for text in texts:
        ids = torch.tensor([[*text.prompt, *text.output[:-1]]], device=model.device)
        best = model(ids, logits_to_keep=len(text.output) - 1).logits[0].topk(2)
        clear = best.values[:, 0] - best.values[:, 1] > CLEAR
        found += list(zip(best.indices[:, 0].tolist(), clear.tolist(), strict=True))
    return found


def _print(rows: Sequence[Flips]) -> None:
    table = Table("dtype", "requests", "tokens each", "positions", "not as alone", "not as transformers", "clearly so")
    for row in rows:
        shares = (f"{count / row.tokens:.2%}" for count in (row.alone, row.reference, row.clear))
        table.add_row(row.dtype, *map(str, (row.batch, row.width, row.tokens)), *shares)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.worker.flips", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", type=Path, nargs="+", default=[_PROMPTS], help="JSON Lines with a `prompt` a row")
    parser.add_argument("--texts", type=int, default=48, help="how many of the prompts are answered")
    parser.add_argument("--tokens", type=int, default=100, help="of each answer")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    options = parser.parse_args()
    try:
        prompts = [prompt.text for prompt in read_prompts(options.prompts)][: options.texts]
        rows = list(measure(str(resolve(options.model)), prompts, tokens=options.tokens, device=options.device))
    except (ModelError, PromptError) as error:
        sys.exit(f"flips: {error}")
    _print(rows)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
