"""Tenants' terms, from a file: a line for each, `NAME weight=2 requests=100 tokens=500000`; `*` is everybody else."""

from pathlib import Path

from scheduler_service.core.fairness import Terms

_SETTINGS = {"weight": "weight", "requests": "max_requests", "tokens": "max_tokens"}


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
    values: dict[str, float] = {}
    for setting in settings:
        name, _, text = setting.partition("=")
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if name not in _SETTINGS or not 0 < value < float("inf"):
            raise ValueError(f"{where}: {setting!r} is not NAME=NUMBER over 0, with a name of {', '.join(_SETTINGS)}")
        values[_SETTINGS[name]] = value
    return Terms(**values)
