"""The gain of a probe of remaining length over words alone, on answers that it has not learned from: each is foretold
before it teaches, as in a scheduler with one request at a time. Serves nobody.

`laps-sd distill --target MODEL --probe --judge default --prompts ... --out DIR` answers prompts and reads the answers;
`python -m laps_sd.probe_trial DIR/judged.jsonl` prints Markdown. The second half of the answers is judged, in several
shuffled orders.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

from scheduler_service.core.beliefs import Length
from scheduler_service.core.known import Known
from scheduler_service.core.probed import MOST_KEPT, Kept, Line, former
from scheduler_service.core.types import Request
from scheduler_service.predictor.features import of_prompt
from scheduler_service.predictor.online import OnlinePredictor

AGES = (1, 64)  # tokens of output after which it is judged what remains
FIELDS = {"output_tokens", "max_tokens", "prompt_tokens", "prompt_ids", "readings"}
INNER_80 = 1.2816  # spreads to both sides, between which 80 % of a normal lies


class Foretold(NamedTuple):
    """ln(tokens) that remained of an answer, and what was believed of it."""

    true: float
    believed: Length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="judged.jsonl")
    parser.add_argument("--orders", type=int, default=20, help="that the answers are taken in")
    flags = parser.parse_args()
    if flags.orders < 1:
        parser.error("--orders: at least one")
    try:
        rows = [json.loads(line) for line in flags.file.read_text().splitlines()]
    except (OSError, ValueError) as error:
        parser.error(f"{flags.file}: {error}")
    if not all(isinstance(row, dict) and row.keys() >= FIELDS for row in rows):
        parser.error(f"{flags.file}: a row needs {', '.join(sorted(FIELDS))}")
    print("|after|believed|answers|explained|in the 80 % interval|")
    print("|---" * 5 + "|")
    orders = [trial(Random(seed).sample(rows, len(rows))) for seed in range(flags.orders)]
    for after in AGES:
        for name in ("words", "words and probe"):
            some = [found for order in orders if (found := order[after, name])]
            if not some:
                continue  # no answer is so long
            share = fmean(map(explained, some))
            print(f"|{after}|{name}|{fmean(map(len, some)):.0f}|{share:.2f}|{fmean(map(covered, some)):.0%}|")


def trial(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[int, str], list[Foretold]]:
    """Of the second half of the rows, by age and by what the beliefs rest on."""
    found: dict[tuple[int, str], list[Foretold]] = {
        (after, name): [] for after in AGES for name in ("words", "words and probe")
    }
    known, predictor, alone = Known(4), OnlinePredictor(), {after: Line() for after in AGES}
    for number, row in enumerate(rows):
        tokens, most = row["output_tokens"], row["max_tokens"]
        features = of_prompt(row["prompt_ids"], most, 2)
        request = Request(f"{number}", 0.0, row["prompt_tokens"], most, expected=predictor.predict(features))
        believed = known.belief(request)
        kept = [Kept(after, former(believed, after), math.log(told)) for after, told in row["readings"]]
        for each in (each for each in kept if each.after in AGES and tokens > each.after):
            true, line = math.log(tokens - each.after), alone[each.after]
            words = line.belief(each.former, 0.0)
            if number >= len(rows) // 2:
                found[each.after, "words"].append(Foretold(true, words))
                found[each.after, "words and probe"].append(Foretold(true, known.probe.belief(each) or words))
            line.observe(each.former, 0.0, true, 1.0)
        known.length.observe(tokens, cut=tokens >= most)
        known.probe.observe(kept[:MOST_KEPT], tokens, cut=tokens >= most)
        predictor.observe(features, tokens, 0, 0, cut=tokens >= most)
        if predictor.due:
            predictor.refit()
    return found


def explained(some: Sequence[Foretold]) -> float:
    """Share of the variance of ln(tokens that remain)."""
    mean = fmean(one.true for one in some)
    left = sum((one.true - one.believed.location) ** 2 for one in some)
    total = sum((one.true - mean) ** 2 for one in some)
    return 1 - left / total if total else 0.0


def covered(some: Sequence[Foretold]) -> float:
    """The share that lies in its 80 % interval."""
    return fmean(abs(one.true - one.believed.location) <= INNER_80 * one.believed.spread for one in some)


if __name__ == "__main__":
    main()
