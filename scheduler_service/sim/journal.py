"""What a long bench has measured so far, kept in a file, so that a run that was stopped goes on where it was.

One line of JSON a unit, behind a first line that says what the run is; no figure is computed here.
"""

import json
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Self

Figures = Mapping[str, Mapping[str, float]]  # policy -> name -> value


class Journal:
    """Units already measured by `run`, a description equal for equal figures. A file of another run begins anew; a last
    line that was cut short is measured again."""

    def __init__(self, path: Path, run: Mapping[str, Any]) -> None:
        self._path = path
        self._units = _read(path, json.loads(json.dumps(run)))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")
        self._line(run)
        for unit, figures in self._units.items():
            self._line([unit, figures])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """The file stays if the run was stopped, and goes if it came to its end."""
        self._file.close()
        if kind is None:
            self._path.unlink()

    def __contains__(self, unit: str) -> bool:
        return unit in self._units

    def __getitem__(self, unit: str) -> Figures:
        return self._units[unit]

    def add(self, unit: str, figures: Figures) -> None:
        self._units[unit] = figures
        self._line([unit, figures])

    def _line(self, what: object) -> None:
        self._file.write(json.dumps(what) + "\n")
        self._file.flush()


def _read(path: Path, run: object) -> dict[str, Figures]:
    try:
        first, *lines = path.read_text().splitlines()
        if json.loads(first) != run:
            return {}
    except (OSError, ValueError):
        return {}
    units: dict[str, Figures] = {}
    for line in lines:
        try:
            unit, figures = json.loads(line)
        except ValueError:
            break
        units[unit] = figures
    return units


def code_digest(files: Iterable[Path]) -> str:
    """Figures of other code are other figures."""
    digest = sha256()
    for path in sorted(files):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
