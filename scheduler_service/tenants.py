"""The terms of tenants, read from a file. Each tenant has a line, `NAME weight=2 requests=100 tokens=500000
class=default drafts=local`; the line of `*` is for tenants without one. `class` is the best class that a tenant gets,
whatever it asks for; with `drafts=local` no drafter outside a worker reads its texts."""

from pathlib import Path
from typing import Any

from scheduler_service.core.terms import Terms
from scheduler_service.core.types import RequestClass

_NUMBERS = {"weight": "weight", "requests": "max_requests", "tokens": "max_tokens"}
_CLASSES = {klass.name.lower(): klass for klass in RequestClass}
_DRAFTS = {"local": True, "anywhere": False}


def read_terms(file: Path) -> dict[str, Terms]:
    """By name. Raises ValueError that names the line."""
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    terms: dict[str, Terms] = {}
    for number, line in enumerate(lines, 1):
        if words := line.partition("#")[0].split():
            name, *settings = words
            if name in terms:
                raise ValueError(f"{file}: line {number}: {name} came before")
            terms[name] = _terms(f"{file}: line {number}", settings)
    return terms


def _terms(where: str, settings: list[str]) -> Terms:
    values: dict[str, Any] = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        if name == "class" and text in _CLASSES:
            values["best_class"] = _CLASSES[text]
        elif name == "drafts" and text in _DRAFTS:
            values["local_drafts"] = _DRAFTS[text]
        elif name in _NUMBERS and (value := _number(text)) is not None:
            values[_NUMBERS[name]] = value
        else:
            known = (
                f"{', '.join(_NUMBERS)} with a number over 0, class with one of {', '.join(_CLASSES)}, "
                f"drafts with one of {', '.join(_DRAFTS)}"
            )
            raise ValueError(f"{where}: {setting!r} is not NAME=VALUE; known are {known}")
    return Terms(**values)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None
