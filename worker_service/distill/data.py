"""The first half of distillation: prompts in, the target's own output out. Nothing is learned here.

Output is appended to one file as it is finished, so that an interrupted run goes on where it was.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from worker_service.engine.engine import Engine
from worker_service.engine.types import Admission, Finish, Limits, Run, Sampling
from worker_service.model_files import ModelError
from worker_service.prompts import Prompt

_PREFILL_TOKENS = 1024  # in a step: prompts are short, so each is prefilled at once


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer of the target's own."""

    id: str
    category: str
    held_out: bool
    prompt: list[int]
    output: list[int]


def read_samples(file: Path) -> list[Sample]:
    """What `generate` wrote. A line that is no sample, as the last one if an interruption has cut it short, is left
    out."""
    if not file.exists():
        return []
    samples = []
    for line in file.read_text().splitlines():
        try:
            samples.append(Sample(**json.loads(line)))
        except (TypeError, ValueError):
            continue
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
    """Answer `prompts`, `batch` at a time, until `file` holds `tokens` of output or there are no more. Returns all
    samples.

    `encode` renders a prompt as the service would; `progress` is told the tokens of output so far. An answer that ends
    with an error is no sample. Raises ModelError if there are only such.
    """
    samples, failed = read_samples(file), ""
    scratch = file.with_suffix(".new")
    scratch.write_text("".join(_line(sample) for sample in samples))
    scratch.replace(file)
    done = {sample.id for sample in samples}
    total = sum(len(sample.output) for sample in samples)
    waiting = (prompt for prompt in prompts if prompt.id not in done)
    running: dict[str, Sample] = {}
    with file.open("a") as out:
        while True:
            progress(total)
            # Answers that are under way count as they are by now, so that no more are begun than needed.
            while len(running) < batch and total + sum(len(s.output) for s in running.values()) < tokens:
                if (prompt := next(waiting, None)) is None:
                    break
                ids = list(encode(prompt.text))
                if len(ids) > max_prompt_tokens:
                    continue
                sampling = Sampling(temperature if prompt.sampled else 0.0, seed=prompt.hash)
                engine.admit(Admission(prompt.id, 0, ids, len(ids), sampling, Limits(max_tokens)))
                running[prompt.id] = Sample(prompt.id, prompt.category, prompt.held_out, ids, [])
            if not running:
                if failed and not samples:
                    raise ModelError(f"no prompt could be answered: {failed}")
                return samples
            for row in engine.step([Run(key, 0, _PREFILL_TOKENS) for key in running], batch).rows:
                running[row.request_id].output.extend(row.tokens)
                if row.finish is not None:
                    engine.forget(row.request_id)
                    sample = running.pop(row.request_id)
                    if row.finish is Finish.ERROR:
                        failed = row.error
                        continue
                    total += len(sample.output)
                    samples.append(sample)
                    out.write(_line(sample))
                    out.flush()


def _line(sample: Sample) -> str:
    return json.dumps(asdict(sample), separators=(",", ":")) + "\n"
