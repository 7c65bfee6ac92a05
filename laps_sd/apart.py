"""Drafters in processes of their own: where workers look for them, and what one of them is told. Nothing is started
here."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from laps_sd.options import REMOTE, Options
from laps_sd.ports import HOST, StackError


class OtherTokens(StackError):
    """A drafter's model cannot guess for this model; the message says so."""

    hopeless = True


def check_tokens(model: Path, small: Path) -> None:
    """Raises OtherTokens unless a token of one is the same text in the other."""
    if model != small and _tokens(model) != _tokens(small):
        raise OtherTokens(f"--drafter-model: {small.name} has other tokens than {model.name}: no guess would fit")


def _tokens(folder: Path) -> dict[str, Any]:
    """Token ids by text; of a tokenizer without such a table, the whole of it."""
    tokenizer: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"].get("vocab")
    if isinstance(vocabulary, list):
        vocabulary = {entry[0]: place for place, entry in enumerate(vocabulary)}
    if not isinstance(vocabulary, dict):
        return tokenizer
    return vocabulary | {added["content"]: added["id"] for added in tokenizer.get("added_tokens", [])}


def pointed(options: Options, ports: Sequence[int]) -> Options:
    """The same options, with the drafters of these ports for the workers, if there are any."""
    if not ports:
        return options
    return replace(options, drafter=REMOTE + ",".join(f"{HOST}:{port}" for port in ports))


def nearest(drafter: str, index: int) -> str:
    """What worker number `index` is told of `--drafter`: of several addresses each worker begins with another one."""
    if not drafter.startswith(REMOTE):
        return drafter
    addresses = drafter.removeprefix(REMOTE).split(",")
    first = index % len(addresses)
    return REMOTE + ",".join(addresses[first:] + addresses[:first])


def flags(options: Options, port: int, model: Path, threads: int) -> list[str]:
    """Of `python -m worker_service.drafting`."""
    told = {"host": HOST, "port": port, "model": model, "device": options.device, "dtype": options.dtype}
    told |= {"threads": threads, "log-level": options.log_level}
    return [word for name, value in told.items() for word in (f"--{name}", str(value))]
