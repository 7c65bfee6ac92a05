"""The first half of distillation: prompts in, the target's own output out. Nothing is learned here.

Output is appended to one file as it is finished, so that an interrupted run goes on where it was.
"""

import gzip
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from worker_service.engine.engine import Engine
from worker_service.engine.types import Limits, Run, Sampling

_PREFILL_TOKENS = 1024  # chunk: prompts are short, one round takes any of them
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
    def held_out(self) -> bool:
        return self.test or _hash(self.id) % _HELD_OUT == 0

    @property
    def sampled(self) -> bool:
        """Whether its answer is: the others are greedy."""
        return not self.held_out and _hash(self.id) // _HELD_OUT % _SAMPLED == 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of the target's own."""

    id: str
    category: str
    held_out: bool
    prompt: list[int]
    output: list[int]


class PromptError(Exception):
    """Prompts that cannot be read; the message says which and why."""


def read_prompts(files: Iterable[Path], exclude: Iterable[Path] = (), *, test: bool = False) -> list[Prompt]:
    """JSON Lines (also .gz) with a `prompt` in each row. Raises PromptError.

    Categories take turns, and within them the rows' `source`s, so that the beginning is as varied as the whole.
    Prompts of `exclude` are left out. `test`: all of these are for evaluation.
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
        raise PromptError("no prompts: give files of JSON Lines with a `prompt` in each row")
    return list(_turns(_turns(_shuffled(source)) for source in groups.values()))


def _shuffled(sources: dict[str, list[Prompt]]) -> Iterator[list[Prompt]]:
    for prompts in sources.values():
        yield sorted(prompts, key=lambda prompt: _hash(prompt.id))


def _turns(sequences: Iterable[Iterable[Prompt]]) -> Iterator[Prompt]:
    """One of each sequence in turn, until all are used up."""
    return (prompt for prompt in chain.from_iterable(zip_longest(*sequences)) if prompt is not None)


def _rows(file: Path) -> Iterator[dict[str, Any]]:
    try:
        with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
            for number, line in enumerate(lines, 1):
                row = json.loads(line)
                if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
                    raise PromptError(f"{file}:{number}: a row needs `prompt`, a text")
                yield row
    except (OSError, ValueError) as error:
        raise PromptError(f"{file}: {error}") from error


def _key(text: str) -> str:
    return hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:16]


def _hash(key: str) -> int:
    return int(key, 16)


def read_samples(file: Path) -> list[Sample]:
    """What `generate` wrote. A last line that was cut short by an interruption is left out."""
    if not file.exists():
        return []
    samples = []
    for line in file.read_text().splitlines():
        try:
            samples.append(Sample(**json.loads(line)))
        except ValueError:
            break
    return samples


def generate(
    engine: Engine,
    encode: Callable[[str], Sequence[int]],
    prompts: Iterable[Prompt],
    file: Path,
    *,
    tokens: int,
    batch: int,
    max_tokens: int,
    temperature: float,
    max_prompt_tokens: int,
    progress: Callable[[int], None],
) -> list[Sample]:
    """Answer `prompts` in batches of `batch` until `file` holds `tokens` of output, or they end; returns all of it.

    `encode` renders a prompt as the service would; `progress` is told the tokens of output so far.
    """
    samples = read_samples(file)
    file.write_text("".join(_line(sample) for sample in samples))
    done = {sample.id for sample in samples}
    total = sum(len(sample.output) for sample in samples)
    waiting = (prompt for prompt in prompts if prompt.id not in done)
    running: dict[str, Sample] = {}
    with file.open("a") as out:
        while True:
            progress(total)
            # What runs already will bring its share: no more is begun than is needed.
            while len(running) < batch and total + sum(len(s.output) for s in running.values()) < tokens:
                if (prompt := next(waiting, None)) is None:
                    break
                ids = list(encode(prompt.text))
                if len(ids) > max_prompt_tokens:
                    continue
                sampling = Sampling(temperature if prompt.sampled else 0.0, seed=_hash(prompt.id))
                engine.admit(prompt.id, 0, ids, len(ids), sampling, Limits(max_tokens))
                running[prompt.id] = Sample(prompt.id, prompt.category, prompt.held_out, ids, [])
            if not running:
                return samples
            for row in engine.step([Run(key, 0, _PREFILL_TOKENS) for key in running], batch).rows:
                running[row.request_id].output.extend(row.tokens)
                if row.finish is not None:
                    engine.forget(row.request_id)
                    sample = running.pop(row.request_id)
                    total += len(sample.output)
                    samples.append(sample)
                    out.write(_line(sample))
                    out.flush()


def _line(sample: Sample) -> str:
    return json.dumps(asdict(sample), separators=(",", ":")) + "\n"
