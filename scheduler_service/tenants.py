"""The terms of tenants, read from a file. Each tenant has a line, `NAME weight=2 requests=100 tokens=500000
class=default drafts=local`; the line of `*` is for tenants without one. `class` is the best class that a tenant gets,
whatever it asks for; with `drafts=local` no drafter outside a worker reads its texts."""

from math import inf, nan
from pathlib import Path
from typing import Any

from scheduler_service.core.terms import Terms
from scheduler_service.core.types import RequestClass

_BOUNDS = {"requests": "max_requests", "tokens": "max_tokens"}
_LEAST_WEIGHT, _MOST_WEIGHT = 1e-6, 1e6  # service over weight is counted in whole grains
_CLASSES = {klass.name.lower(): klass for klass in RequestClass}
_DRAFTS = {"local": True, "anywhere": False}


def read_terms(file: Path) -> dict[str, Terms]:
    """By name. Raises ValueError that names the file, and the line if one is wrong."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: is not UTF-8") from error
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
        elif name == "weight" and _LEAST_WEIGHT <= (weight := _number(text)) <= _MOST_WEIGHT:
            values["weight"] = weight
        elif name in _BOUNDS and 0 < (bound := _number(text)) < inf:
            values[_BOUNDS[name]] = bound
        else:
            known = (
                f"weight with a number from {_LEAST_WEIGHT:f} to {_MOST_WEIGHT:.0f}; {', '.join(_BOUNDS)} with one "
                f"over 0; class with one of {', '.join(_CLASSES)}; drafts with one of {', '.join(_DRAFTS)}"
            )
            raise ValueError(f"{where}: {setting!r} is no setting; known are {known}")
    return Terms(**values)


def _number(text: str) -> float:
    """NaN, which lies between no bounds, if it is none."""
    try:
        return float(text)
    except ValueError:
        return nan
