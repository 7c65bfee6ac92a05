"""Answers of the real model, as the recordings under docs/benchmarks have them: how long prompt and answer were, the
bound that the client had set, and what each round drafted and accepted. Requests are drawn of them at random, by seed;
nothing is served here."""

import gzip
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

RECORDINGS = Path(__file__).parents[2] / "docs" / "benchmarks" / "recordings"
OF = ("slots4-0.95-repetition1-fcfs", "slots4-0.95-repetition2-fcfs")  # the others are of the same requests
MOST_PROMPT, MOST = 128, 256  # tokens
LESSONS = 200  # the first ones are for what comes before a comparison; comparisons draw from the others


@dataclass(frozen=True)
class Answer:
    """`prompt`, `tokens`: how many, of the question and the answer. `most`: the bound. `rounds`: by output tokens
    before, drafted and accepted ones."""

    kind: str
    prompt: int
    tokens: int
    most: int
    rounds: dict[int, tuple[int, int]]


@cache
def answers() -> tuple[Answer, ...]:
    return tuple(each for name in OF for each in _read(RECORDINGS / f"{name}.jsonl.gz"))


def _read(file: Path) -> Iterator[Answer]:
    """Those to short prompts; long answers are cut."""
    with gzip.open(file, "rt") as lines:
        for told in map(json.loads, lines):
            rounds, at = {}, 0
            for drafted, accepted in zip(told["drafted"], told["accepted"], strict=True):
                rounds[at] = drafted, accepted
                at += accepted + 1
            tokens, most = min(told["output_tokens"], MOST), min(told["max_tokens"], MOST)
            if told["prompt_tokens"] <= MOST_PROMPT:
                yield Answer(told["category"], told["prompt_tokens"], tokens, most, rounds)


def lessons() -> list[Answer]:
    return list(answers()[:LESSONS])


def drawn(count: int, seed: int) -> list[Answer]:
    """Each at most once. Raises ValueError where there are not so many."""
    return random.Random(seed).sample(answers()[LESSONS:], count)
