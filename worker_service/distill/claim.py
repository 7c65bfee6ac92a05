"""Whose a work folder is: what lies there was made of one target, by answers of one kind. Nothing is generated here."""

import hashlib
import json
from argparse import Namespace
from collections.abc import Sequence

from worker_service.distill.data import read_samples
from worker_service.model_files import ModelError
from worker_service.models import LoadedModel
from worker_service.prompts import Prompt

SAMPLES = "samples"  # the file of answers that are learned from


def claim(options: Namespace, target: LoadedModel) -> None:
    """Make the work folder, or go on in it. Raises ModelError if what it holds was made of another model or of other
    answers."""
    about = {
        "target": target.fingerprint,
        "max_tokens": options.max_tokens,
        "max_prompt_tokens": options.max_prompt_tokens,
        "temperature": options.temperature,
    }
    options.work.mkdir(parents=True, exist_ok=True)
    file = options.work / "about.json"
    answered = any(samples.stat().st_size for samples in options.work.glob("*.jsonl"))
    if not file.exists() or not answered:
        file.write_text(json.dumps(about, indent=1) + "\n")
        return
    try:
        known = json.loads(file.read_text())
    except ValueError as error:
        raise ModelError(f"{file}: {error}; remove the folder, or give --work another one") from error
    if other := [name for name, value in about.items() if known.get(name) != value]:
        told = f"{options.work} holds samples of another {' and '.join(other)}"
        raise ModelError(f"{told}; give --work another folder, or remove this one")


def name_of(tests: Sequence[Prompt]) -> str:
    """The file of answers to these prompts; others have another."""
    return "test-" + hashlib.sha256("".join(sorted(prompt.id for prompt in tests)).encode()).hexdigest()[:8]


def check_unlearned(options: Namespace, tests: Sequence[Prompt]) -> None:
    """Raises ModelError if a prompt of `tests` was answered to be learned from: a head that is there knows it."""
    learned = {sample.id for sample in read_samples(options.work / f"{SAMPLES}.jsonl") if not sample.held_out}
    if known := sum(prompt.id in learned for prompt in tests):
        told = f"{options.work} holds answers to learn from to {known} prompts of --test"
        raise ModelError(f"{told}; give --work another folder, or remove this one")
