"""Prompts of three kinds for comparisons: the project's own, or from files. Nothing is random here."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from laps_sd import own_prompts as own
from worker_service.prompts import Prompt, read_prompts

KINDS = ("chat", "code", "reasoning")


def own_prompts() -> list[Prompt]:
    """Seven hundred of each kind."""
    return [Prompt(hashlib.sha256(text.encode()).hexdigest()[:16], kind, text) for kind, text in own.texts()]


def prompts_of(files: Sequence[Path], longest: int) -> list[Prompt]:
    """The prompts of `files` (JSON Lines, also .gz, with `prompt` and `kind`), or the project's own without files. Only
    those of KINDS, with at most `longest` characters. Raises PromptError."""
    every = read_prompts(files) if files else own_prompts()
    return [prompt for prompt in every if prompt.category in KINDS and len(prompt.text) <= longest]


def digest(prompts: Sequence[Prompt]) -> str:
    """Requests are drawn by kind."""
    told = sorted(f"{prompt.id} {prompt.category} {prompt.text}" for prompt in prompts)
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


def counted(prompts: Sequence[Prompt]) -> Iterator[tuple[str, int]]:
    for kind in KINDS:
        yield kind, sum(prompt.category == kind for prompt in prompts)
