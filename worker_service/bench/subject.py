"""What a bench is about: a target, its prompts and its drafter, from files or made up. Nothing is timed here."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from worker_service.bench import synthetic
from worker_service.drafters import make_drafter
from worker_service.engine.drafting.drafter import Drafter
from worker_service.models import LoadedModel, choose_device, choose_dtype, load, load_alone, weights_taken
from worker_service.prompts import PromptError, encode, read_prompts
from worker_service.pull import resolve

BLOCK_TOKENS = 64
PROMPTS = Path(__file__).with_name("prompts.jsonl")
_TUNING = 4  # one prompt in so many is for choosing draft lengths, and is not measured
_SYNTHETIC_PROMPTS, _SYNTHETIC_PROMPT_TOKENS = 64, 128


@dataclass(frozen=True, slots=True)
class Subject:
    name: str
    directory: str  # empty: made up
    # Each makes a new one at each call, for an engine changes the model that it is given.
    model: Callable[[], Any]  # as transformers loads it
    served: Callable[[], Any]  # as a worker loads it
    tokenizer: Any
    drafter: Callable[[int], Drafter]  # makes one, with so many blocks of KV if it needs any
    assistant: Callable[[], dict[str, Any]]  # options of `generate` for drafts that are most like this drafter's
    prompts: list[list[int]]
    tuning: list[list[int]]
    device: torch.device
    dtype: torch.dtype
    context_tokens: int

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def subject(options: Namespace) -> Subject:
    """Raises ModelError, PromptError or OSError."""
    return _made_up(options) if options.synthetic else _from_files(options)


def _from_files(options: Namespace) -> Subject:
    directory = str(resolve(options.model))
    target = load(directory, options.device, options.dtype)
    dtype = str(target.dtype).removeprefix("torch.")
    texts = read_prompts(options.prompts or [PROMPTS], test=True)
    ids = (encode(target.tokenizer, prompt.text) for prompt in texts)
    prompts = [prompt for prompt in ids if len(prompt) <= options.max_prompt_tokens]
    if len(prompts) < _TUNING:
        raise PromptError(f"only {len(prompts)} prompts have at most {options.max_prompt_tokens} tokens")

    def drafter(blocks: int) -> Drafter:
        return make_drafter(options.drafter, target, blocks=blocks, block_tokens=BLOCK_TOKENS)

    def served() -> LoadedModel:
        if target.device.type == "cpu":
            taken = weights_taken(Path(directory), target.dtype, BLOCK_TOKENS, "auto")
            return load_alone(Path(directory), target.dtype, BLOCK_TOKENS, "auto", taken)
        return load(directory, str(target.device), dtype)

    def assistant() -> dict[str, Any]:
        folder = Path(options.drafter).expanduser()
        if (folder / "config.json").is_file():
            return {"assistant_model": load(str(folder), str(target.device), dtype).model}
        return {"prompt_lookup_num_tokens": options.lookup}

    return Subject(
        name=target.name,
        directory=directory,
        model=lambda: load(directory, str(target.device), dtype).model,
        served=lambda: served().model,
        tokenizer=target.tokenizer,
        drafter=drafter,
        assistant=assistant,
        prompts=[prompt for i, prompt in enumerate(prompts) if i % _TUNING],
        tuning=prompts[::_TUNING],
        device=target.device,
        dtype=target.dtype,
        context_tokens=options.max_prompt_tokens + options.tokens,
    )


def _made_up(options: Namespace) -> Subject:
    shape = synthetic.SHAPES[options.synthetic]
    device = choose_device(options.device)
    dtype = choose_dtype(options.dtype, device)
    prompts = synthetic.prompts(shape, _SYNTHETIC_PROMPTS, _SYNTHETIC_PROMPT_TOKENS)
    return Subject(
        name=options.synthetic,
        directory="",
        model=lambda: synthetic.counting_model(shape, device, dtype),
        served=lambda: synthetic.counting_model(shape, device, dtype),
        tokenizer=synthetic.tokenizer(),
        drafter=lambda blocks: synthetic.OracleDrafter(shape.vocabulary, options.acceptance),
        assistant=lambda: {"prompt_lookup_num_tokens": options.lookup},
        prompts=prompts[_TUNING:],
        tuning=prompts[:_TUNING],
        device=device,
        dtype=dtype,
        context_tokens=_SYNTHETIC_PROMPT_TOKENS + options.tokens,
    )
