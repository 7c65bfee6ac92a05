"""The online predictor on real prompts and answer lengths: asked before it is told, request by request. Serves nobody.

`python -m laps_sd.predictor_trial --help`. It prints a line of Markdown for each run.
"""

import argparse
import gzip
import json
import math
import re
import statistics
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple, TypeVar

from scheduler_service.core.beliefs import Length
from scheduler_service.predictor.features import of_prompt
from scheduler_service.predictor.model import NORMAL_90
from scheduler_service.predictor.online import OnlinePredictor

T = TypeVar("T")
Tokenize = Callable[[str], Sequence[int]]


class Asked(NamedTuple):
    """ln(tokens) of one answer, of what set its prompt is, and what was expected; None: the mean."""

    set: str
    true: float
    expected: Length | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="+", type=Path, help="JSON Lines (also .gz): prompt, and the length's field")
    parser.add_argument("--length", default="reference_tokens,answer_tokens.gpt-4-0314,answer_tokens.o3-mini")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json; default: hashed words")
    parser.add_argument("--in-order", action="store_true", help="file after file, which is a drift; default: shuffled")
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    tokenize = tokenizer(flags.tokenizer) if flags.tokenizer else words
    rows = [row for file in flags.file for row in read(file, flags.length.split(","))]
    if not rows:
        parser.error(f"no row with a prompt and any of {flags.length}")
    if not flags.in_order:
        Random(flags.seed).shuffle(rows)
    predictor, took = OnlinePredictor(), defaultdict[str, list[float]](list)
    asked = list(ask(predictor, rows, tokenize, took))
    second_half = asked[len(asked) // 2 :]
    print("| requests | explained | by the set | in the interval | spread | predict ms | observe ms | refit s |")
    print("|---|---|---|---|---|---|---|---|")
    known = [one.expected for one in second_half if one.expected]
    cells = [
        f"{len(rows)}",
        f"{explained(second_half):.2f}",
        f"{explained_by_set(second_half):.2f}",
        f"{covered(second_half):.3f}",
        f"{statistics.median(length.spread for length in known):.2f}" if known else "-",
        f"{1e3 * statistics.median(took['predict']):.2f}",
        f"{1e3 * statistics.median(took['observe']):.2f}",
        f"{took['refit'][-1]:.2f} (first {took['refit'][0]:.2f})" if took["refit"] else "-",
    ]
    print("| " + " | ".join(cells) + " |")


def read(file: Path, lengths: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    """Set, prompt and answer tokens of the rows that have them. Raises ValueError and OSError."""
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
        for row in map(json.loads, lines):
            for name in lengths:
                field, _, inner = name.partition(".")
                value = row.get(field)
                tokens = value.get(inner) if inner and isinstance(value, dict) else value
                if isinstance(tokens, int) and tokens > 0:
                    yield row.get("set", file.name), row["prompt"], tokens
                    break


def ask(
    predictor: OnlinePredictor,
    rows: Sequence[tuple[str, str, int]],
    tokenize: Tokenize,
    took: defaultdict[str, list[float]],
) -> Iterator[Asked]:
    """As a scheduler would with one request at a time; `took`: seconds of the processor."""

    def timed(what: str, call: Callable[..., T], *arguments: object) -> T:
        began = time.process_time()
        result = call(*arguments)
        took[what].append(time.process_time() - began)
        return result

    for name, prompt, tokens in rows:
        ids = tokenize(prompt)
        expected = timed("predict", lambda ids: predictor.predict(of_prompt(ids, 2048, 2)), ids)
        yield Asked(name, math.log(tokens), expected.length if expected else None)
        timed("observe", lambda ids, tokens: predictor.observe(of_prompt(ids, 2048, 2), tokens, 0, 0), ids, tokens)
        if predictor.due:
            timed("refit", predictor.refit)


def explained(asked: Sequence[Asked]) -> float:
    """Share of the variance of ln(tokens)."""
    mean = statistics.fmean(one.true for one in asked)
    left = sum((one.true - (one.expected.location if one.expected else mean)) ** 2 for one in asked)
    return 1 - left / sum((one.true - mean) ** 2 for one in asked)


def explained_by_set(asked: Sequence[Asked]) -> float:
    """The same, by the mean of each set's answers: what knowing the set would bring, in hindsight."""
    sets = defaultdict[str, list[float]](list)
    for one in asked:
        sets[one.set].append(one.true)
    left = sum(statistics.pvariance(lengths) * len(lengths) for lengths in sets.values())
    return 1 - left / (statistics.pvariance([one.true for one in asked]) * len(asked))


def covered(asked: Sequence[Asked]) -> float:
    hits = [abs(one.true - one.expected.location) <= NORMAL_90 * one.expected.spread for one in asked if one.expected]
    return statistics.fmean(hits) if hits else math.nan


def words(text: str) -> Sequence[int]:
    return [zlib.crc32(word.encode()) for word in re.findall(r"\w+|[^\w\s]", text.lower())]


def tokenizer(file: Path) -> Tokenize:
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(file))
    return lambda text: loaded.encode(text).ids


if __name__ == "__main__":
    main()
