"""`laps-sd distill --probe`: answers of the target's own become a probe of remaining length, and what it is worth.
`--judge`: what a probe reads of answers, in a file that `python -m laps_sd.probe_trial` takes."""

import hashlib
import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from worker_service.distill.data import Sample
from worker_service.distill.lengths import Examples, Fit, explained, fit, install
from worker_service.distill.train import Features
from worker_service.engine.length_head import (
    VERSION,
    LengthHead,
    LengthHeadConfig,
    follow,
    middle,
    save_length_head,
)
from worker_service.engine.shape import text_config
from worker_service.models import LoadedModel
from worker_service.prompts import PromptError

EVERY = 32  # tokens of output from one reading to the next
LEARNED = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768)  # tokens of output after which later readings are learned
JUDGED = 64  # where they are judged


@dataclass(frozen=True, slots=True)
class Worth:
    """Share of the variance of ln(tokens that remain) that readings explain: at the first token, and at JUDGED. Of
    answers that a bound has cut nobody knows what remained: they count nowhere."""

    answers: int
    first: float
    later: float


def make_probe(
    options: Namespace, target: LoadedModel, learned: Sequence[Sample], judges: Sequence[Sample]
) -> dict[str, Worth]:
    """Into `options.out`. What it is worth: on answers that it learned from, by fits without them, and on `judges`.
    Raises PromptError if there are too few answers."""
    first, later = (_examples(options, target, "probe", learned, at) for at in ((0,), LEARNED))
    try:
        fits = fit(first), fit(later)
    except ValueError as error:
        raise PromptError(str(error)) from error
    size = text_config(target.model.config).hidden_size
    head = LengthHead(LengthHeadConfig(VERSION, target.name, target.fingerprint, size, EVERY))
    install(head, *fits)
    save_length_head(head, options.out)
    worth = {"learned": _left_out(learned, first, later, fits), "held out": _judged(options, target, head, judges)}
    report = {name: asdict(each) for name, each in worth.items()}
    (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    return worth


def judge(options: Namespace, target: LoadedModel, head: LengthHead, judges: Sequence[Sample]) -> Path:
    """Answers, with what the probe reads of them, as rows of a workload file in `options.out`."""
    judges = [sample for sample in judges if len(sample.output) > 1]
    longest = max((len(sample.output) for sample in judges), default=0)
    readings: list[list[list[float]]] = [[] for _ in judges]
    later = tuple(range(head.config.every - 1, longest, head.config.every))
    for layer, ats in ((head.first, (0,)), (head.later, later)):
        try:
            seen = _examples(options, target, "judges", judges, ats)
        except (PromptError, ValueError):
            continue  # none is so long
        with torch.inference_mode():
            tokens = middle(layer(seen.inputs).log_softmax(-1)).exp().tolist()
        for number, left, told in zip(seen.answers.tolist(), seen.left.tolist(), tokens, strict=True):
            readings[number].append([len(judges[number].output) - int(left), round(told, 2)])
    options.out.mkdir(parents=True, exist_ok=True)
    file: Path = options.out / "judged.jsonl"
    with file.open("w") as rows:
        for number, (sample, read) in enumerate(zip(judges, readings, strict=True)):
            row = {
                "arrival_s": number,
                "prompt_tokens": len(sample.prompt),
                "output_tokens": len(sample.output),
                "max_tokens": options.max_tokens,
                "category": sample.category,
                "prompt_ids": sample.prompt,
                "readings": read,
            }
            rows.write(json.dumps(row) + "\n")
    return file


def tell_worth(worth: dict[str, Worth], options: Namespace, console: Console) -> None:
    """For people."""
    table = Table(title="explained variance of ln(tokens that remain)")
    for name in ("answers", "number", "at the first token", f"after {JUDGED} more"):
        table.add_column(name, justify="left" if name == "answers" else "right")
    for name, each in worth.items():
        table.add_row(name, f"{each.answers}", f"{each.first:.2f}", f"{each.later:.2f}")
    console.print(table)
    if not any(each.answers for each in worth.values()):
        console.print("no answer has ended by itself, so the probe knows nothing: raise --max-tokens")
    command = f"LAPS_SD_WORKER_PROBE={options.out} laps-sd up --model {options.target}"
    console.print(f"the probe: {options.out}; serve with it: {command}")


def _examples(
    options: Namespace, target: LoadedModel, name: str, samples: Sequence[Sample], ats: Sequence[int]
) -> Examples:
    """The positions after the first token (0), or after so many."""
    ids = hashlib.sha256(repr([(sample.prompt, sample.output) for sample in samples]).encode()).hexdigest()[:8]
    size = text_config(target.model.config).hidden_size
    features = Features(options.work / f"features-{name}-{ids}.bin", samples, size)
    features.compute(target.model, samples, lambda done, total: None)
    inputs, left, cut, answers = [], [], [], []
    for number, sample in enumerate(samples):
        states = features.of(number, len(sample.prompt) - 1).float()
        ended = sample.output[-1] in target.eos_ids
        mean, seen = states[0], 0
        for at in ats:
            if len(sample.output) <= at + 1:
                break
            mean, seen = _mean(mean, seen, states[: at + 1]), at + 1
            inputs.append(torch.cat([states[at], mean]) if at else states[0])
            left.append(len(sample.output) - at - 1)
            cut.append(not ended)
            answers.append(number)
    if not inputs:
        raise PromptError(f"too few answers of more than {min(ats) + 1} tokens")
    return Examples(torch.stack(inputs), torch.tensor(left).float(), torch.tensor(cut), torch.tensor(answers))


def _mean(mean: torch.Tensor, seen: int, states: torch.Tensor) -> torch.Tensor:
    """As the engine has it, which sees a state after the other."""
    for number in range(seen, len(states)):
        mean = follow(mean, number, states[number : number + 1])
    return mean


def _left_out(learned: Sequence[Sample], first: Examples, later: Examples, fits: tuple[Fit, Fit]) -> Worth:
    lengths = torch.tensor([len(sample.output) for sample in learned])
    shares = [
        _explained(part, one.guessed, lengths[part.answers] - part.left == at + 1)
        for at, part, one in zip((0, JUDGED), (first, later), fits, strict=True)
    ]
    return Worth(int((~first.cut).sum()), *shares)


def _judged(options: Namespace, target: LoadedModel, head: LengthHead, judges: Sequence[Sample]) -> Worth:
    shares: list[float] = []
    for at, layer in ((0, head.first), (JUDGED, head.later)):
        try:
            seen = _examples(options, target, "judges", judges, (at,))
        except PromptError:
            shares.append(0.0)
            continue
        with torch.inference_mode():
            guessed = middle(layer(seen.inputs).log_softmax(-1))
        shares.append(_explained(seen, guessed, torch.ones_like(seen.cut)))
    return Worth(sum(sample.output[-1] in target.eos_ids for sample in judges), *shares)


def _explained(part: Examples, guessed: torch.Tensor, judged: torch.Tensor) -> float:
    """Of the positions that are `judged` [n], in answers that ended."""
    whole = judged & ~part.cut
    return explained(part.left[whole].log().tolist(), guessed[whole].tolist())
