"""Prompts for distillation and benches, in an order that mixes their kinds, rendered as the service renders them."""

import gzip
import hashlib
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

_HELD_OUT = 32  # one prompt in so many is kept for evaluation
_SAMPLED = 3  # one prompt in so many is answered by sampling, the others greedily


@dataclass(frozen=True, slots=True)
class Prompt:
    """`category` is the file's name up to the first dot, unless its rows say `domain` or `kind`."""

    id: str
    category: str
    text: str
    test: bool = False  # kept for evaluation in any case

    @property
    def hash(self) -> int:
        return int(self.id, 16)

    @property
    def held_out(self) -> bool:
        return self.test or self.hash % _HELD_OUT == 0

    @property
    def sampled(self) -> bool:
        """Whether its answer is sampled; the others are greedy."""
        return not self.held_out and self.hash // _HELD_OUT % _SAMPLED == 0


class PromptError(Exception):
    """Prompts that cannot be read; the message says which and why."""


def read_prompts(files: Iterable[Path], exclude: Iterable[Path] = (), *, test: bool = False) -> list[Prompt]:
    """JSON Lines (also .gz) with a `prompt` in each row. Raises PromptError.

    Categories alternate, and within each of them the rows' `source`s, so that the beginning is as varied as the whole.
    Prompts that are in `exclude` are left out. `test`: all of these prompts are for evaluation.
    """
    excluded = {_key(row["prompt"]) for file in exclude for row in _rows(file)}
    groups: dict[str, dict[str, list[Prompt]]] = defaultdict(lambda: defaultdict(list))
    seen = set(excluded)
    for file in files:
        for row in _rows(file):
            key = _key(row["prompt"])
            if key not in seen:
                seen.add(key)
                category = str(row.get("domain") or row.get("kind") or file.name.split(".")[0])
                source = str(row.get("source") or row.get("set") or "").split(":")[0]
                groups[category][source].append(Prompt(key, category, row["prompt"], test))
    if not groups:
        if excluded:
            raise PromptError("no prompts but those of --test")
        raise PromptError("no prompts: give files of JSON Lines with a `prompt` in each row")
    return list(_in_turn(_in_turn(_shuffled(source)) for source in groups.values()))


def _shuffled(sources: dict[str, list[Prompt]]) -> Iterator[list[Prompt]]:
    for prompts in sources.values():
        yield sorted(prompts, key=lambda prompt: prompt.hash)


def _in_turn(sequences: Iterable[Iterable[Prompt]]) -> Iterator[Prompt]:
    """One prompt of each sequence in turn, until all are used up."""
    return (prompt for prompt in chain.from_iterable(zip_longest(*sequences)) if prompt is not None)


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    try:
        opener = gzip.open if file.suffix == ".gz" else open
        with opener(file, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                row = json.loads(line)
                if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
                    raise PromptError(f"{file}:{number}: a row needs `prompt`, a text")
                row["prompt"].encode()  # half a surrogate pair is no text
                yield row
    except (OSError, ValueError, EOFError, zlib.error, RecursionError) as error:
        raise PromptError(f"{file}: {error}") from error


def _key(text: str) -> str:
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:16]


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a user's message, in the chat template where the tokenizer has one."""
    if tokenizer.chat_template is None:
        return list(tokenizer(text).input_ids)
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(rendered, add_special_tokens=False).input_ids)
